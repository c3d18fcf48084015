-- Starts, stops and ends of an owner's executions, of the usual shape, and steps between them: tried before the rest of
-- the commit script is defined, as steps are. What they change in the indexes is gathered by what they have in common and
-- written once for all: a call costs the server more than a member does. A stop stands behind the start of its execution.

local find = string.find
local notable = false
local starts, stops = {}, {} -- the second by the state that they lead to
local quick, slow = {}, {} -- ids of which something is gathered here, and those that the rest of the script has changed

-- Change an index. If it is none, nothing that it should hold or lose is acknowledged.
local function index(places, command, key, values)
  if attempt(call_with_all, command, key, values) == 'd' then
    for _, broken in ipairs(places) do answers[#answers + 1] = broken .. '=d' end
  end
end

local function group_of(groups, owner, common)
  local of_owner = groups[owner]
  if not of_owner then
    of_owner = {}
    groups[owner] = of_owner
  end
  local group = of_owner[common]
  if group == nil then
    local queue, flow = match(common, '^(%S+) (%S+) %-$')
    group = queue and {
      owned = base .. 'i:owned:running:' .. owner, queue = queue, flow = flow,
      kept = base .. 'i:owned:paused:' .. owner,
      places = {}, ids = {}, ranked = {}, paused = {}, created = {}, ended = {}
    } or false
    of_owner[common] = group
    if group then groups[#groups + 1] = group end
  end
  return group
end

local function listed(group, state, command, values)
  index(group.places, command, base .. 'i:state:' .. state, values)
  index(group.places, command, base .. 'i:flow:' .. state .. ':' .. group.flow, values)
  index(group.places, command, base .. 'i:queue:' .. state .. ':' .. group.queue, values)
end

local function write_quick()
  for _, group in ipairs(starts) do
    index(group.places, 'ZADD', group.owned, group.ranked)
    listed(group, 'running', 'ZADD', group.created)
  end
  for state, groups in pairs(stops) do
    for _, group in ipairs(groups) do
      index(group.places, 'ZREM', group.owned, group.ranked)
      listed(group, 'running', 'ZREM', group.ids)
      listed(group, state, 'ZADD', group.created)
      index(group.places, 'ZADD', group.kept, group.paused)
      index(group.places, 'ZADD', base .. 'i:ended', group.ended)
    end
  end
  starts, stops, quick = {}, {}, {}
end

-- The group of one that runs, its rank and when it was made. None where the record does not tell, or names a parent.
local function grouped(groups, owner, record)
  local cut = owner and record and find(record, ' ', 34, true)
  if not cut or byte(record, 33) ~= 32 then return nil end
  local created = sub(record, 34, cut - 1)
  local group = tonumber(created) and group_of(groups, owner, sub(record, cut + 1))
  return group, sub(record, 1, 32), created
end

-- ARGV: what `save_plain` takes, but in the fourth place the moment of the end, or "" where it pauses and keeps its owner.
-- Only if it ran, and neither messages nor entries nor children wait for its end.
local function leave_running(at, state)
  local id, before, ended, keep = ARGV[at], ARGV[at + 2], ARGV[at + 3], ARGV[at + 9]
  if ttl ~= '' or slow[id] then return nil end
  local found = call('HMGET', base .. 'x:' .. id, 'c', 'g')
  local old = found[1]
  if not old or sub(old, 9, 8 + #before) ~= before then return nil end
  local owner = match(old, '^%d+ %d+ 0 running 0 (=.*)$', 9 + #before)
  stops[state] = stops[state] or {}
  local group, rank, created = grouped(stops[state], owner, found[2])
  if not group or (ended ~= '' and call('EXISTS', base .. 'e:' .. id, base .. 'm:' .. id,
      base .. 'i:kept:' .. name_of(id), base .. 'i:freed') > 0) then return nil end
  put_step(at)
  if keep ~= '' then strip(id, tonumber(keep)) end
  local n = #group.ids + 1
  group.places[n], group.ids[n], group.ranked[n] = place, id, rank .. id
  group.created[2 * n - 1], group.created[2 * n] = created, id
  local list, score, member = group.ended, ended, id
  if ended == '' then list, score, member = group.paused, 0, rank .. id end
  list[2 * n - 1], list[2 * n] = score, member
  quick[id], notable = true, true
  return ''
end

local function end_plain(at)
  return leave_running(at, 'completed')
end

-- The same for what is paused, cancelled or fails, as its control record says, and leaves no new state.
local function stop_plain(at)
  local state = match(ARGV[at + 1], '^%x+ %d+ %d+ %d+ %d+ 0 (%a+) 0 ')
  return state and leave_running(at, state)
end

-- ARGV: what `create` takes. Only one that runs, with one boundary and no blobs, whose id nobody has used.
local function create_plain(at)
  local id, control, record = ARGV[at], ARGV[at + 1], ARGV[at + 6]
  if ARGV[at + 3] ~= '' or ARGV[at + 7] ~= '1' or ARGV[at + 10] == '' or ARGV[at + 11] ~= '0' then return nil end
  local owner = match(control, '^%x+ %d+ %d+ %d+ %d+ 0 running 0 (=.*)$')
  local group, rank, created = grouped(starts, owner, record)
  local x = base .. 'x:' .. id
  if not group or call('EXISTS', x, base .. 'i:gone:facts', base .. 'i:child:' .. name_of(id)) > 0 then return nil end
  call('HSET', base .. 'b:' .. id, ARGV[at + 8], ARGV[at + 9])
  call('HSET', x, 'c', control, 'h', ARGV[at + 2], 'd', ARGV[at + 4], 't', ARGV[at + 5], 'g', record,
    's' .. ARGV[at + 8], ARGV[at + 10])
  local n = #group.places + 1
  group.places[n] = place
  group.ranked[2 * n - 1], group.ranked[2 * n] = 0, rank .. id
  group.created[2 * n - 1], group.created[2 * n] = created, id
  quick[id], notable = true, true
  return ''
end

local plain = { S = save_plain, E = end_plain, P = stop_plain, c = create_plain }

local function do_plain()
  while plain[ARGV[at]] do
    local answer = attempt(plain[ARGV[at]], at + 2)
    if not answer then return end
    answered(answer)
  end
end

local function finished()
  write_quick()
  local reply = table.concat(answers, ' ')
  if number ~= '' then remember(caller, number, reply) end
  -- All is written by now: who may not say so has written it all the same, and others find it by looking.
  if notable then redis.pcall('PUBLISH', base .. 'changes', caller) end
  return reply
end

local ok, failure = pcall(do_plain)
if not ok then -- what was written before stays, and so its indexes must follow
  write_quick()
  error(failure, 0)
end
if not ARGV[at] then return finished() end
