-- The states of named executions. ARGV: ids. Answers id and state in turn; "" for one whose control record is damaged.

local found = {}
for _, id in ipairs(ARGV) do
  local control = call('HGET', base .. 'x:' .. id, 'c')
  if control then
    found[#found + 1] = id
    found[#found + 1] = select(8, match(control, CONTROL)) or ''
  end
end
return found
