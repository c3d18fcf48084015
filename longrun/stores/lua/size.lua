-- Bytes that an execution takes: exact for what is large, near enough for the rest. ARGV: id.

local id = ARGV[1]
if call('EXISTS', base .. 'x:' .. id) == 0 then return 0 end
local total = 0
for _, kind in ipairs({ 'x:', 'o:', 'e:', 'm:' }) do
  local key = base .. kind .. id
  for _, field in ipairs(call('HKEYS', key)) do total = total + #field + call('HSTRLEN', key, field) end
end
local rows = call('HLEN', base .. 'b:' .. id)
return total + rows * 120
