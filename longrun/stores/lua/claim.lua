-- Give executions to an owner: those named, or those that are due, in order of rank (priority, age, id).
-- ARGV: name of the caller, number of the call, "=" and owner, now, limit, how many of them to read, bytes after which no
-- further one is read, then lists, each with its length first or "-" for none: states, ids, workflows, queues, dead owners
-- (each with its "=").
-- Answers {"<id> <fence> <id> <fence> …", ids of executions whose control record is damaged, and, packed into two values,
-- what `whole.lua` says of the first of those given}. A repeated answer has nothing of that.

local caller, number, me, now, limit = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local PAGE = 128
local EXAMINED = 50000
local MOVED = 5000

local most = tonumber(ARGV[6])
room = tonumber(ARGV[7])

local at = 8
local function list()
  local count = ARGV[at]
  at = at + 1
  if count == '-' then return nil end
  local items = {}
  for n = at, at + tonumber(count) - 1 do items[#items + 1] = ARGV[n] end
  at = at + tonumber(count)
  return items
end

local function set(items)
  if not items then return nil end
  local members = {}
  for _, item in ipairs(items) do members[item] = true end
  return members
end

local state_list = list()
local states = set(state_list)
local ids = list()
local flows, queues = set(list()), set(list())
local dead_list = list()
local dead = set(dead_list)

local taken, given, damaged = {}, {}, {}

-- What changes in an index is gathered and written at the end. Each execution is taken once, and leaves before it enters.
local changes, changed = { ZREM = {}, ZADD = {} }, { ZREM = {}, ZADD = {} }

local function gather(command, key)
  local values = changes[command][key]
  if not values then
    values = {}
    changes[command][key] = values
    changed[command][#changed[command] + 1] = key
  end
  return values
end

zadd = function(key, score, member)
  local values = gather('ZADD', key)
  values[#values + 1], values[#values + 2] = score, member
end

zrem = function(key, member)
  local values = gather('ZREM', key)
  values[#values + 1] = member
end

local function write_index(command, key)
  local values = changes[command][key]
  for from = 1, #values, 1000 do call(command, key, unpack(values, from, math.min(from + 999, #values))) end
end

-- All that can be; what failed first.
local function write_indexes()
  local first
  for _, command in ipairs({ 'ZREM', 'ZADD' }) do
    for _, key in ipairs(changed[command]) do
      local ok, failure = pcall(write_index, command, key)
      if not ok then first = first or failure end
    end
  end
  return first
end

local function take(id, f, part)
  local state, wake, owner = part[8], part[9], part[10]
  local crashes = tonumber(part[4])
  if owner ~= '-' and owner ~= me and (state == 'running' or state == 'resuming') then crashes = crashes + 1 end
  local fence = string.format('%.0f', tonumber(part[2]) + 1)
  local text = string.format('%s %s %.0f %s 0 %s %s ', fence, part[3], crashes, part[5], state, wake) .. me
  call('HSET', base .. 'x:' .. id, 'c', sealed(id, text))
  if owner ~= me or part[6] == '1' then
    move(id, f, state, wake, owner, part[6], state, wake, me, '0')
  end
  taken[id] = true
  given[#given + 1] = id
  given[#given + 1] = fence
end

-- The control record and facts of an execution; nil if there is none or if it is damaged, which is noted.
local function look(id)
  local found = call('HMGET', base .. 'x:' .. id, 'c', 'g')
  if not found[1] then return nil end
  local part = { match(found[1], CONTROL) }
  local f = facts(found[2])
  if not part[1] or not f or sealed(id, sub(found[1], 10)) ~= found[1] then
    damaged[#damaged + 1] = id
    taken[id] = true
    return nil, nil, true
  end
  return part, f
end

local function wanted(f, part)
  local owner = part[10]
  return states[part[8]] and (not flows or flows[f.flow]) and (not queues or queues[f.queue])
    and (owner == '-' or dead[owner])
end

local function due(part)
  local moment = due_at(part[8], part[9], part[6])
  return moment ~= '-' and tonumber(moment) <= now
end

local function claim_named()
  local found = {}
  for _, id in ipairs(ids) do
    if not taken[id] then
      local part, f = look(id)
      if part and wanted(f, part) then
        taken[id] = true
        found[#found + 1] = { id = id, part = part, facts = f, rank = f.rank .. id }
      end
    end
  end
  table.sort(found, function(a, b) return precedes(a.rank, b.rank) end)
  for n = 1, math.min(limit, #found) do take(found[n].id, found[n].facts, found[n].part) end
end

-- What became due joins what is ready, whoever asks.
local function gather_due()
  for _, id in ipairs(call('ZRANGEBYSCORE', base .. 'i:timed', '-inf', ARGV[4], 'LIMIT', 0, MOVED)) do
    call('ZREM', base .. 'i:timed', id)
    local found = call('HMGET', base .. 'x:' .. id, 'c', 'g')
    local f = facts(found[2])
    local state = found[1] and select(8, match(found[1], CONTROL))
    if f and state then
      add_ready(id, f, state)
    else
      call('ZREM', base .. 'i:due', id)
    end
  end
end

local function sources()
  local found = {}
  local function add(key) found[#found + 1] = { key = key, page = {}, n = 0, last = '-' } end
  for _, group in ipairs(call('SMEMBERS', base .. 'i:groups')) do
    local state, queue, flow = match(group, '^(%S+) (%S+) (%S+)$')
    if states[state] and (not queues or queues[queue]) and (not flows or flows[flow]) then
      add(base .. 'i:ready:' .. group)
    end
  end
  for _, state in ipairs(state_list) do
    for _, owner in ipairs(dead_list) do add(base .. 'i:owned:' .. state .. ':' .. owner) end
  end
  return found
end

local function head_of(source)
  if source.n < #source.page then return source.page[source.n + 1] end
  if source.last == nil then return nil end
  source.page = call('ZRANGEBYLEX', source.key, source.last, '+', 'LIMIT', 0, PAGE)
  source.n = 0
  source.last = #source.page == PAGE and '(' .. source.page[PAGE] or nil
  return source.page[1]
end

local function first(all)
  local best, best_member
  for _, source in ipairs(all) do
    local member = head_of(source)
    if member and (not best or precedes(member, best_member)) then best, best_member = source, member end
  end
  if best then best.n = best.n + 1 end
  return best, best_member
end

-- An entry of an index that its execution does not bear out any more is removed on sight.
local function belongs(source, part, f)
  local state, owner = part[8], part[10]
  if owner == '-' then return source.key == base .. 'i:ready:' .. ready_key(state, f) end
  return source.key == base .. 'i:owned:' .. state .. ':' .. owner
end

local function claim_due()
  gather_due()
  local all = sources()
  for _ = 1, EXAMINED do
    if #given >= 2 * limit then return end
    local source, member = first(all)
    if not source then return end
    local id = sub(member, 33)
    if not taken[id] then
      local part, f, broken = look(id)
      if part and belongs(source, part, f) then
        if wanted(f, part) and due(part) then take(id, f, part) end
      elseif not broken then
        call('ZREM', source.key, member)
      end
    end
  end
end

local answered = recall(caller, number)
if answered then
  if type(answered) == 'table' then return answered end
  return { answered, {}, '', '' }
end
tidy()
local ok, failure = pcall(function()
  if limit > 0 then
    if ids then claim_named() else claim_due() end
  end
end)
local unwritten = write_indexes() -- of what was taken before a failure too: it stays taken
if not ok or unwritten then error(failure or unwritten, 0) end
local reply = table.concat(given, ' ')
remember(caller, number, reply)
-- What is taken is taken: one that cannot be read keeps nobody from hearing of it.
local read, whole = pcall(function()
  for n = 1, math.min(#given, 2 * most), 2 do
    load(given[n])
    if room < 0 then break end
  end
  return packed(values)
end)
if not read then whole = { '', '' } end
return { reply, damaged, whole[1], whole[2] }
