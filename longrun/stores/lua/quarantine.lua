-- Keep damaged bytes: never overwritten, never deleted by the library. ARGV: id, then part and bytes in turn.
-- A damaged message says nothing of where its execution stands, so it also leaves the queue, if it is still the same.

local id = ARGV[1]
for n = 2, #ARGV, 2 do
  local part, value = ARGV[n], ARGV[n + 1]
  call('HSETNX', base .. 'quarantine', id .. ' ' .. part, value)
  local message = match(part, '^message/(.*)$')
  if message and call('HGET', base .. 'm:' .. id, message) == value then
    call('HDEL', base .. 'm:' .. id, message)
    local control = call('HGET', base .. 'x:' .. id, 'c')
    local owner = control and select(10, match(control, CONTROL))
    if owner and owner ~= '-' and call('EXISTS', base .. 'm:' .. id) == 0 then
      call('SREM', base .. 'i:mail:' .. owner, id)
    end
  end
end
return 1
