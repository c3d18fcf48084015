-- A batch of writes, in order. Answers only what the caller cannot foresee, as "<place>=<code>" joined by spaces:
--   x the id is taken    n no such execution    l another fence    w<revision> a write before it is missing
--   m<number> the message's number    f too many messages    d a record that cannot be read
-- ARGV: name of the caller, number of the call or "" (only saves: they are comparisons), milliseconds that what is
-- finished is kept or "", and the writes as one MessagePack list of strings (one argument costs a tenth of thousands):
-- kind, number of arguments, arguments, and so on. Below, ARGV is that list: `steps.lua`, which stands before this text,
-- unpacked it; it and `starts.lua` did the plain writes at its front. KEYS_REMEMBERED stands at the very top.

-- What the other writes change in an index is gathered too, and written at the end, each index once. Nothing here reads
-- what is gathered; what one write adds and a later one removes is removed.
local gathered, indexes = {}, {}

local function gather(key, score, member)
  local found = gathered[key]
  if not found then
    found = { scores = {}, places = {} }
    gathered[key], indexes[#indexes + 1] = found, key
  end
  found.scores[member] = score
  found.places[#found.places + 1] = place
end

zadd = gather
zrem = function(key, member) gather(key, false, member) end

local function write_index(key)
  local added, removed = {}, {}
  for member, score in pairs(gathered[key].scores) do
    if score then
      added[#added + 1] = score
      added[#added + 1] = member
    else
      removed[#removed + 1] = member
    end
  end
  index(gathered[key].places, 'ZREM', key, removed)
  index(gathered[key].places, 'ZADD', key, added)
end

local function write_indexes()
  for _, key in ipairs(indexes) do write_index(key) end
end

-- This one's indexes change here. What `starts.lua` has gathered of it comes before that; and nothing more comes there.
local function leave_quick(id)
  if quick[id] then write_quick() end
  slow[id] = true
end

-- Each of these reads one list from ARGV[at] on, its length first, and returns where the next one begins.
local function put_pairs(key, at)
  local count = tonumber(ARGV[at])
  for n = at + 1, at + 2 * count, 2 do call('HSET', key, ARGV[n], ARGV[n + 1]) end
  return at + 2 * count + 1
end

local function remove_each(key, at)
  local count = tonumber(ARGV[at])
  for n = at + 1, at + count do call('HDEL', key, ARGV[n]) end
  return at + count + 1, count
end

-- With `fields`, which go into the same hash as the states.
local function put_boundaries(id, at, fields)
  local count = tonumber(ARGV[at])
  local rows = {}
  for n = at + 1, at + 3 * count, 3 do
    rows[#rows + 1], rows[#rows + 2] = ARGV[n], ARGV[n + 1]
    if ARGV[n + 2] ~= '' then fields[#fields + 1], fields[#fields + 2] = 's' .. ARGV[n], ARGV[n + 2] end
  end
  call_with_all('HSET', base .. 'b:' .. id, rows)
  call_with_all('HSET', base .. 'x:' .. id, fields)
  return at + 3 * count + 1
end

-- Everything of a save but the fields of its head.
-- From ARGV[at] on: keep_from or "", clear, boundaries, blobs, drop, put, take, drop_blobs, and either two empty strings or
-- the definition and the steps that a first runner gives it.
local function apply_rest(id, at, owner, fields)
  local keep, clear = ARGV[at], ARGV[at + 1]
  at = put_boundaries(id, at + 2, fields)
  at = put_pairs(base .. 'o:' .. id, at)
  if clear == '1' then call('DEL', base .. 'e:' .. id) end
  at = remove_each(base .. 'e:' .. id, at)
  at = put_pairs(base .. 'e:' .. id, at)
  local taken
  at, taken = remove_each(base .. 'm:' .. id, at)
  if taken > 0 and owner ~= '-' and call('EXISTS', base .. 'm:' .. id) == 0 then
    call('SREM', base .. 'i:mail:' .. owner, id)
  end
  if keep ~= '' then strip(id, tonumber(keep)) end
  at = remove_each(base .. 'o:' .. id, at)
  if ARGV[at] ~= '' then call('HSET', base .. 'x:' .. id, 'd', ARGV[at], 't', ARGV[at + 1]) end
end

-- One may ask for its children, maybe again: what they came to must not expire meanwhile.
local function hold(id)
  local name = name_of(id)
  local children, kept, gone = base .. 'i:child:' .. name, base .. 'i:kept:' .. name, base .. 'i:gone'
  if call('EXISTS', children) == 0 then return end
  call('ZREM', base .. 'i:freed', name)
  for from = 0, call('ZCARD', children) - 1, SWEPT do
    local ids = call('ZRANGE', children, from, from + SWEPT - 1)
    for n, at in ipairs(call('ZMSCORE', gone, unpack(ids))) do
      local left = at and call('PTTL', base .. 'x:' .. ids[n]) or 0
      if left > 0 then
        persist(ids[n], { parent = name })
        call('ZADD', kept, ttl ~= '' and ttl or left, ids[n])
      end
    end
  end
end

-- The state, the owner or the moment to wake changed: so do the indexes.
local function reindex(id, f, woken, state, wake, owner, ended, new)
  leave_quick(id)
  local new_woken, new_state, new_wake, new_owner = new[6], new[8], new[9], new[10]
  local over = OVER[new_state]
  if over then
    local some = call('DEL', base .. 'e:' .. id, base .. 'm:' .. id) > 0
    if some and owner ~= '-' then call('SREM', base .. 'i:mail:' .. owner, id) end
  elseif new_owner == '-' and new_woken == '0' and not FINISHED[new_state] and
      call('EXISTS', base .. 'm:' .. id) == 1 then
    new_woken = '1'
    local control = sealed(id, table.concat({ new[2], new[3], new[4], new[5], '1', new[7] }, ' '))
    call('HSET', base .. 'x:' .. id, 'c', control)
  end
  move(id, f, state, wake, owner, woken, new_state, new_wake, new_owner, new_woken, over)
  if FINISHED[new_state] then
    if ended ~= '' then zadd(base .. 'i:ended', ended, id) end
    if ttl ~= '' then retire(id, f, new_state, ttl) end
  end
  if over then
    free(id)
  elseif FINISHED[state] and state ~= new_state then
    hold(id)
  end
  notable = true
end

local function compare(id, old, fence, revision)
  if not old then return 'n' end
  local _, old_fence, old_revision, _, _, woken, rest, state, wake, owner = match(old, CONTROL)
  if not old_fence then return 'd' end
  if old_fence ~= fence then return 'l' end
  local behind = tonumber(revision) - tonumber(old_revision)
  if behind <= 0 then return '' end
  if behind > 1 then return 'w' .. old_revision end
  return nil, woken, rest, state, wake, owner
end

-- A step, a stop or an end that is not as `save_plain`, `stop_plain` or `end_plain` would have it.
local function save_changed(at, ended)
  local id, keep = ARGV[at], ARGV[at + 9]
  local new = { match(ARGV[at + 1], CONTROL) }
  local refusal, woken, rest, state, wake, owner = compare(id, call('HGET', base .. 'x:' .. id, 'c'), new[2], new[3])
  if refusal then return refusal end
  local f = (rest ~= new[7] or woken ~= new[6] or FINISHED[new[8]]) and facts_of(id)
  put_step(at)
  if f then reindex(id, f, woken, state, wake, owner, ended, new) end
  if keep ~= '' then strip(id, tonumber(keep)) end
  return ''
end

local function save_step(at)
  return save_plain(at) or save_changed(at, '')
end

local function save_end(at)
  return end_plain(at) or save_changed(at, ARGV[at + 3])
end

local function save_stop(at)
  return stop_plain(at) or save_changed(at, ARGV[at + 3])
end

-- Any other save. ARGV: id, control, head, ended or "", then what `apply_rest` takes.
local function save(at)
  local id, control, ended = ARGV[at], ARGV[at + 1], ARGV[at + 3]
  local new = { match(control, CONTROL) }
  local stored = call('HMGET', base .. 'x:' .. id, 'c', 'g')
  local refusal, woken, rest, state, wake, owner = compare(id, stored[1], new[2], new[3])
  if refusal then return refusal end
  local f = (rest ~= new[7] or woken ~= new[6] or owner == '-' or FINISHED[new[8]]) and known(stored[2])
  apply_rest(id, at + 4, owner, { 'c', control, 'h', ARGV[at + 2] })
  if f then reindex(id, f, woken, state, wake, owner, ended, new) end
  return ''
end

-- ARGV: id, control, head, ended or "", definition, step names, index record, boundaries, blobs.
local function create(at)
  local done = create_plain(at)
  if done then return done end
  local id, control = ARGV[at], ARGV[at + 1]
  local x = base .. 'x:' .. id
  if call('EXISTS', x) == 1 then return 'x' end
  leave_quick(id)
  if call('HEXISTS', base .. 'i:gone:facts', id) == 1 then forget(id) end
  local f = facts(ARGV[at + 6])
  local new = { match(control, CONTROL) }
  local fields = { 'c', control, 'h', ARGV[at + 2], 'd', ARGV[at + 4], 't', ARGV[at + 5], 'g', f.text }
  put_pairs(base .. 'o:' .. id, put_boundaries(id, at + 7, fields))
  enter_listing(id, f, new[8])
  enter_claims(id, f, new[8], new[9], new[10], new[6])
  if f.parent ~= '-' then call('ZADD', base .. 'i:child:' .. f.parent, f.created, id) end
  if FINISHED[new[8]] then
    if ARGV[at + 3] ~= '' then zadd(base .. 'i:ended', ARGV[at + 3], id) end
    if ttl ~= '' then retire(id, f, new[8], ttl) end
  end
  if not OVER[new[8]] then hold(id) end
  notable = true
  return ''
end

local function remember_key(id, key, message)
  local keys = base .. 'k:' .. id
  call('ZADD', keys, message, key)
  local over = call('ZCARD', keys) - KEYS_REMEMBERED - call('HLEN', base .. 'm:' .. id)
  if over > 0 then call('ZREMRANGEBYRANK', keys, 0, over - 1) end
end

local function rouse(id, f, part)
  leave_quick(id)
  local control = sealed(id, table.concat({ part[2], part[3], part[4], part[5], '1', part[7] }, ' '))
  call('HSET', base .. 'x:' .. id, 'c', control)
  move(id, f, part[8], part[9], part[10], '0', part[8], part[9], part[10], '1')
end

-- ARGV: id, limit, "=" and key or "", message, of which the first 8 bytes are the checksum of the rest.
local function send(at)
  local id, limit, key, message = ARGV[at], tonumber(ARGV[at + 1]), ARGV[at + 2], ARGV[at + 3]
  local x, messages = base .. 'x:' .. id, base .. 'm:' .. id
  local control = call('HGET', x, 'c')
  if not control then return 'n' end
  local part = { match(control, CONTROL) }
  if not part[1] then return 'd' end
  if key ~= '' then
    local seen = call('ZSCORE', base .. 'k:' .. id, key)
    if seen then return 'm' .. seen end
  end
  if call('HLEN', messages) >= limit then return 'f' end
  local sleeps = part[10] == '-' and part[6] == '0' and not FINISHED[part[8]]
  local f = sleeps and facts_of(id)
  local count = call('HINCRBY', x, 'm', 1)
  local check = sub(redis.sha1hex(id .. '\0' .. count .. '\0' .. sub(message, 1, 8)), 1, 8)
  call('HSET', messages, count, check .. message)
  if key ~= '' then remember_key(id, key, count) end
  local left = call('PTTL', x)
  if left > 0 then
    call('PEXPIRE', messages, left)
    call('PEXPIRE', base .. 'k:' .. id, left)
  end
  if part[10] ~= '-' then
    call('SADD', base .. 'i:mail:' .. part[10], id)
  elseif f then
    rouse(id, f, part)
  end
  notable = true
  return 'm' .. count
end

local writes = { S = save_step, E = save_end, P = save_stop, s = save, c = create, m = send }
while ARGV[at] do
  local ok, answer = pcall(attempt, writes[ARGV[at]], at + 2)
  if not ok then
    write_quick()
    write_indexes()
    error(answer, 0)
  end
  answered(answer)
end
write_indexes()
return finished()
