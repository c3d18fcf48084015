-- Put a sound control record and index record in the place of damaged ones. ARGV: id, the control record as it was
-- found, what stands before and after the fence in the new one, the new index record.
-- The old fence cannot be believed. The server's clock in milliseconds is above any that claims alone could reach, so no
-- former owner is ever taken for the new one. Which state it had is told by the listing if the head cannot tell.

local id, old, revision, rest, record = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local x = base .. 'x:' .. id
if call('HGET', x, 'c') ~= old then return 0 end
local f = facts(record)
local STATES = {
  'initialized', 'running', 'paused', 'resuming', 'waiting', 'blocked', 'completed', 'failed', 'cancelled'
}
local listed
for _, state in ipairs(STATES) do
  if call('ZSCORE', base .. 'i:state:' .. state, id) then listed = state end
  leave_listing(id, f, state)
  remove_ready(id, f, state)
end
call('ZREM', base .. 'i:due', id)
call('ZREM', base .. 'i:timed', id)
local seq, state, wake = match(rest, '^(%d+) (%S+) (%S+)$')
if state == '-' then state = listed or 'running' end
local time = call('TIME')
local fence = string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
local text = table.concat({ fence, revision, '0', seq, '0', state, wake, '-' }, ' ')
call('HSET', x, 'c', sealed(id, text), 'g', record)
enter_listing(id, f, state)
enter_claims(id, f, state, wake, '-', '0')
return 1
