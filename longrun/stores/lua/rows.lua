-- Named executions as a listing shows them. ARGV: ids. Answers id, control, head, definition in turn.

local found = {}
for _, id in ipairs(ARGV) do
  local row = call('HMGET', base .. 'x:' .. id, 'c', 'h', 'd')
  if row[1] then
    for _, value in ipairs({ id, row[1], row[2], row[3] }) do found[#found + 1] = value end
  end
end
return packed(found)
