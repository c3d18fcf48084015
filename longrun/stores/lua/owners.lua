-- Owners and their leases, by the server's clock. ARGV: register | renew | unregister | list, owner, seconds, record.

local action, owner = ARGV[1], ARGV[2]
local time = call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000

local function lease(seconds)
  call('ZADD', base .. 'leases', string.format('%.6f', now + tonumber(seconds)), owner)
end

if action == 'register' then
  call('HSET', base .. 'owners', owner, ARGV[4])
  lease(ARGV[3])
  return 1
elseif action == 'renew' then
  if call('HEXISTS', base .. 'owners', owner) == 0 then return 0 end
  lease(ARGV[3])
  return 1
elseif action == 'unregister' then
  call('HDEL', base .. 'owners', owner)
  call('ZREM', base .. 'leases', owner)
  return 1
end
local found = call('HGETALL', base .. 'owners')
local answers = {}
for n = 1, #found, 2 do
  local till = call('ZSCORE', base .. 'leases', found[n])
  answers[#answers + 1] = found[n]
  answers[#answers + 1] = found[n + 1]
  answers[#answers + 1] = string.format('%.6f', (tonumber(till or '') or now) - now)
end
return answers
