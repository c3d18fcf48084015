-- Remove an execution of which nothing can be read; every value of it goes into quarantine first.
-- ARGV: name of the caller, number of the call, id, the control record as it was found. Answers "1", or "0" if the
-- execution is not what was found any more.
-- Where even the index record is damaged, what is left of it in an index is removed on sight by whoever comes upon it.

local answered = recall(ARGV[1], ARGV[2])
if answered then return answered end

local id, control = ARGV[3], ARGV[4]
local x = base .. 'x:' .. id
local STATES = {
  'initialized', 'running', 'paused', 'resuming', 'waiting', 'blocked', 'completed', 'failed', 'cancelled'
}

local function discard()
  if call('HGET', x, 'c') ~= control then return '0' end
  local part = { match(control, CONTROL) }
  local f = facts(call('HGET', x, 'g'))
  for _, state in ipairs(STATES) do
    call('ZREM', base .. 'i:state:' .. state, id)
    if f then
      leave_listing(id, f, state)
      remove_ready(id, f, state)
      if part[1] then leave_claims(id, f, state, part[9], part[10], part[6]) end
    end
  end
  call('ZREM', base .. 'i:due', id)
  call('ZREM', base .. 'i:timed', id)
  call('ZREM', base .. 'i:ended', id)
  leave_expiry(id, f)
  if part[1] and part[10] ~= '-' then call('SREM', base .. 'i:mail:' .. part[10], id) end
  for _, kind in ipairs(PARTS) do
    if kind ~= 'k:' then
      local found = call('HGETALL', base .. kind .. id)
      for n = 1, #found, 2 do
        call('HSETNX', base .. 'quarantine', id .. ' deleted/' .. kind .. found[n], found[n + 1])
      end
    end
    call('UNLINK', base .. kind .. id)
  end
  free(id)
  return '1'
end

local reply = discard()
remember(ARGV[1], ARGV[2], reply)
return reply
