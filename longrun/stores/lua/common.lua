-- The control record of an execution, and the indexes that follow from it: what every script shares.

local CONTROL = '^(%x%x%x%x%x%x%x%x) (%d+) (%d+) (%d+) (%d+) ([01]) ((%a+) (%S+) (.*))$'
local NEEDS_DUE = { initialized = true, waiting = true, resuming = true }
local FINISHED = { completed = true, failed = true, cancelled = true }
local OVER = { completed = true, cancelled = true } -- what nobody can retry
local PARTS = { 'x:', 'b:', 'o:', 'e:', 'm:', 'k:' }
local SWEPT = 200 -- executions in one call of whoever looks or claims
local LET_GO = 100 -- and in one end of an execution

local function sealed(id, text)
  return sub(redis.sha1hex(id .. '\0' .. text), 1, 8) .. ' ' .. text
end

-- Bytes decide, not the collation of the server's locale, which is what `<` would ask.
local function precedes(a, b)
  local shorter = math.min(#a, #b)
  for n = 1, shorter do
    local x, y = byte(a, n), byte(b, n)
    if x ~= y then return x < y end
  end
  return #a < #b
end

-- What the indexes need to know of an execution and what never changes.
local function facts(text)
  if not text then return nil end
  local rank, created, queue, flow, parent = match(text, '^(%S+) (%S+) (%S+) (%S+) (%S+)$')
  return tonumber(created) and { text = text, rank = rank, created = created, queue = queue, flow = flow, parent = parent }
end

local function known(text)
  local found = facts(text)
  if not found then error('DAMAGED the index record of an execution') end
  return found
end

local function facts_of(id)
  return known(call('HGET', base .. 'x:' .. id, 'g'))
end

-- From when on one that nobody owns may be claimed as due; "-" for never by itself.
local function due_at(state, wake, woken)
  if state == 'running' then return '0' end
  if not NEEDS_DUE[state] then return '-' end
  if woken == '1' then return '0' end
  return wake
end

local function ready_key(state, f)
  return state .. ' ' .. f.queue .. ' ' .. f.flow
end

-- What most indexes gain and lose goes through these two, which `commit.lua` changes.
local function zadd(key, score, member)
  call('ZADD', key, score, member)
end

local function zrem(key, member)
  call('ZREM', key, member)
end

local function add_ready(id, f, state)
  local group = ready_key(state, f)
  call('ZADD', base .. 'i:ready:' .. group, 0, f.rank .. id)
  call('SADD', base .. 'i:groups', group)
end

local function remove_ready(id, f, state)
  local group = ready_key(state, f)
  local ready = base .. 'i:ready:' .. group
  if call('ZREM', ready, f.rank .. id) == 1 and call('EXISTS', ready) == 0 then
    call('SREM', base .. 'i:groups', group)
  end
end

local function enter_claims(id, f, state, wake, owner, woken)
  if owner ~= '-' then
    zadd(base .. 'i:owned:' .. state .. ':' .. owner, 0, f.rank .. id)
    return
  end
  local due = due_at(state, wake, woken)
  if due == '-' then return end
  zadd(base .. 'i:due', due, id)
  if due == '0' then
    add_ready(id, f, state)
  else
    zadd(base .. 'i:timed', due, id)
  end
end

local function leave_claims(id, f, state, wake, owner, woken)
  if owner ~= '-' then
    zrem(base .. 'i:owned:' .. state .. ':' .. owner, f.rank .. id)
  elseif due_at(state, wake, woken) ~= '-' then
    zrem(base .. 'i:due', id)
    zrem(base .. 'i:timed', id)
    remove_ready(id, f, state)
  end
end

local function enter_listing(id, f, state)
  zadd(base .. 'i:state:' .. state, f.created, id)
  zadd(base .. 'i:flow:' .. state .. ':' .. f.flow, f.created, id)
  zadd(base .. 'i:queue:' .. state .. ':' .. f.queue, f.created, id)
end

local function leave_listing(id, f, state)
  zrem(base .. 'i:state:' .. state, id)
  zrem(base .. 'i:flow:' .. state .. ':' .. f.flow, id)
  zrem(base .. 'i:queue:' .. state .. ':' .. f.queue, id)
  if FINISHED[state] then zrem(base .. 'i:ended', id) end
end

-- A parent may ask for its children again until it is over, and a failed one as long as it can be retried. What ends
-- before that waits in i:kept:<parent>, scored by its time to live; i:freed are the parents that are over, or are gone,
-- while some wait.

-- One is over or gone: its children may go, when it is their turn.
local none_freed = false
local function release(id)
  local name = name_of(id)
  if call('EXISTS', base .. 'i:kept:' .. name) == 1 then
    call('ZADD', base .. 'i:freed', 0, name)
    none_freed = false
  end
end

-- Remove one that expired from the indexes.
local function forget(id)
  local state, text = match(call('HGET', base .. 'i:gone:facts', id) or '', '^(%a+) (.*)$')
  local f = facts(text)
  if f then
    leave_listing(id, f, state)
    if f.parent ~= '-' then call('ZREM', base .. 'i:child:' .. f.parent, id) end
  end
  call('ZREM', base .. 'i:gone', id)
  call('HDEL', base .. 'i:gone:facts', id)
  release(id)
end

-- By the server's clock, in milliseconds.
local function moment(later)
  local time = call('TIME')
  return string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000) + later)
end

-- Forget what expired, up to a number of them; whether there may be more. A key may outlive its moment by the length of
-- this script.
local function sweep(most)
  local gone, forgotten = base .. 'i:gone', 0
  if call('EXISTS', gone) == 0 then return false end
  for _, id in ipairs(call('ZRANGEBYSCORE', gone, '-inf', moment(0), 'LIMIT', 0, most)) do
    if call('EXISTS', base .. 'x:' .. id) == 0 then
      forget(id)
      forgotten = forgotten + 1
    end
  end
  return forgotten == most
end

-- All keys of a finished execution expire at one moment; the indexes are swept after it, faster than they grow.
local function expire(id, f, state, ttl)
  local at = moment(tonumber(ttl))
  for _, part in ipairs(PARTS) do call('PEXPIREAT', base .. part .. id, at) end
  call('ZADD', base .. 'i:gone', at, id)
  call('HSET', base .. 'i:gone:facts', id, state .. ' ' .. f.text)
  sweep(3)
end

-- The other way round than `name_of`.
local function id_of(name)
  return (string.gsub(sub(name, 2), '%%(%x%x)', function(digits) return string.char(tonumber(digits, 16)) end))
end

-- Whether a parent is there and not over; one that is damaged may be mended.
local function may_ask(name)
  if name == '-' then return false end
  local control = call('HGET', base .. 'x:' .. id_of(name), 'c')
  return control and not OVER[select(8, match(control, CONTROL)) or '']
end

-- One has ended: its time begins now, or when its parent asks no more.
local function retire(id, f, state, ttl)
  if may_ask(f.parent) then
    call('ZADD', base .. 'i:kept:' .. f.parent, ttl, id)
  else
    expire(id, f, state, ttl)
  end
end

-- Let those expire whose parents ask no more, up to a number of them.
local function let_go(most)
  while most > 0 and not none_freed do
    local name = call('ZRANGE', base .. 'i:freed', 0, 0)[1]
    if not name then
      none_freed = true
      return
    end
    local found = call('ZPOPMIN', base .. 'i:kept:' .. name, most)
    for n = 1, #found, 2 do
      local row = call('HMGET', base .. 'x:' .. found[n], 'c', 'g')
      local state, f = row[1] and select(8, match(row[1], CONTROL)), facts(row[2])
      if f and FINISHED[state or ''] then expire(found[n], f, state, found[n + 1]) end
    end
    if #found < 2 * most then call('ZREM', base .. 'i:freed', name) end
    most = most - #found / 2
  end
end

local function free(id)
  release(id)
  let_go(LET_GO)
end

-- What whoever looks or claims does for all; whether more may have expired.
local function tidy()
  local more = sweep(SWEPT)
  let_go(SWEPT)
  return more
end

-- The same for whoever only wants to look, also where the server takes no writes: 1 if more may have expired, 0 if not, -1
-- if some have and cannot be forgotten.
local function tidied()
  local ok, more = pcall(tidy)
  return ok and (more and 1 or 0) or -1
end

-- Whatever was to become of one that had ended, it stays.
local function persist(id, f)
  if f.parent ~= '-' then call('ZREM', base .. 'i:kept:' .. f.parent, id) end
  if call('ZREM', base .. 'i:gone', id) == 0 then return end
  call('HDEL', base .. 'i:gone:facts', id)
  for _, part in ipairs(PARTS) do call('PERSIST', base .. part .. id) end
end

-- The indexes lose one that is removed, whatever they know of it.
local function leave_expiry(id, f)
  if f and f.parent ~= '-' then
    call('ZREM', base .. 'i:child:' .. f.parent, id)
    call('ZREM', base .. 'i:kept:' .. f.parent, id)
  end
  call('ZREM', base .. 'i:gone', id)
  call('HDEL', base .. 'i:gone:facts', id)
end

-- Change the indexes from what an execution was to what it is now. `silent` if no message is left for it.
local function move(id, f, state, wake, owner, woken, new_state, new_wake, new_owner, new_woken, silent)
  leave_claims(id, f, state, wake, owner, woken)
  enter_claims(id, f, new_state, new_wake, new_owner, new_woken)
  if state ~= new_state then
    leave_listing(id, f, state)
    enter_listing(id, f, new_state)
    if FINISHED[state] then persist(id, f) end
  end
  if owner ~= new_owner and not silent and call('EXISTS', base .. 'm:' .. id) == 1 then
    if owner ~= '-' then call('SREM', base .. 'i:mail:' .. owner, id) end
    if new_owner ~= '-' then call('SADD', base .. 'i:mail:' .. new_owner, id) end
  end
end

-- Numbers as text: most come again and again, and to make one takes longer than to look.
local texts = {}
local function text_of(number)
  local text = texts[number]
  if not text then
    text = tostring(number)
    texts[number] = text
  end
  return text
end

-- Many values as two, their lengths and all their bytes: the driver's time goes with the number of values.
local function packed(values)
  local lengths, present = {}, {}
  for n = 1, #values do
    local value = values[n]
    lengths[n] = text_of(value and #value or -1)
    if value then present[#present + 1] = value end
  end
  return { table.concat(lengths, ' '), table.concat(present) }
end
