-- What every script shares: the names of keys, and what costs next to nothing to define.
-- This text comes before each script. No script is ever built from a value: values come in ARGV alone.
--
-- KEYS[1] is "{prefix}:"; the braces keep all keys of a store in one slot of a cluster. Of one execution:
--   x:<id>  hash: c control, h head, d definition, t step names, g what the indexes need, m number of the last message,
--           s<number> the state of each boundary that has one (they are few, and so a step is two writes)
--   b:<id>  hash: number of a boundary -> its row
--   o:<id>  hash: blobs    e:<id>  hash: entries    m:<id>  hash: messages    k:<id>  sorted set: keys of messages
-- The control record is the part of a head that the server itself reads and changes, as text:
--   <check> <fence> <revision> <crashes> <seq> <woken> <state> <wake> <owner>
-- <check> are 8 digits of a SHA-1 over id and text, since a script has no CRC; <wake> is a moment, or "-" for never by
-- itself; <owner> is "-" for nobody, otherwise "=" and the name.

local base = KEYS[1]
local call = redis.call
local match, sub, byte = string.match, string.sub, string.byte

-- Numbers of the boundaries that have their state, in order; and by number the field of each.
local function states_of(id)
  local kept, fields = {}, {}
  for _, field in ipairs(call('HKEYS', base .. 'x:' .. id)) do
    local seq = byte(field) == 115 and tonumber(sub(field, 2))
    if seq then kept[#kept + 1], fields[seq] = seq, field end
  end
  table.sort(kept)
  return kept, fields
end

-- An id as the names of indexes have it: `wire.named`.
local function name_of(id)
  return '=' .. string.gsub(id, '[^A-Za-z0-9_.~-]', function(letter) return string.format('%%%02X', byte(letter)) end)
end

-- A call that is not a comparison by itself carries a number that grows, and its answer is remembered until the next
-- one: a repetition after a lost answer gets the same answer, and one that comes late changes nothing.
local function recall(name, number)
  local last = call('GET', base .. 'last:' .. name)
  if not last then return nil end
  local before, answer = match(last, '^(%d+) (.*)$')
  if tonumber(before) == tonumber(number) then return answer end
  if tonumber(before) > tonumber(number) then return redis.error_reply('STALE a later call was answered already') end
  return nil
end

local function remember(name, number, answer)
  call('SET', base .. 'last:' .. name, number .. ' ' .. answer, 'EX', 86400)
end
