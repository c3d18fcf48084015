-- The common step of an owner, tried before anything else of the commit script is even defined: a head and one boundary
-- with its state. Most calls hold nothing else, and to define the rest takes the server longer than to save a step.
-- ARGV is what `commit.lua` says; below, it is the list of writes. A call with a number is left to that script whole, which
-- first looks whether it was answered before.

local caller, number, ttl = ARGV[1], ARGV[2], ARGV[3]
local ARGV = cmsgpack.unpack(ARGV[4])
local base, call, sub = KEYS[1], redis.call, string.sub

local function put_step(at)
  call('HSET', base .. 'x:' .. ARGV[at], 'c', ARGV[at + 1], 'h', ARGV[at + 4], ARGV[at + 7], ARGV[at + 8])
  call('HSET', base .. 'b:' .. ARGV[at], ARGV[at + 5], ARGV[at + 6])
end

-- ARGV: id, control, " <fence> <revision before> ", the end of the control record from <woken> on, head, seq, row,
-- "s" and seq, state, keep_from. Only if the old record has that fence and revision and the same end: then no index
-- changes and no pattern is needed.
local function save_plain(at)
  local before, tail = ARGV[at + 2], ARGV[at + 3]
  local old = call('HGET', base .. 'x:' .. ARGV[at], 'c')
  if not old or sub(old, 9, 8 + #before) ~= before or sub(old, -#tail) ~= tail then return nil end
  put_step(at)
  return ''
end

-- A record that somebody else broke refuses its own write; what the server refuses, it refuses for all of them.
local function attempt(write, at)
  local ok, answer = pcall(write, at)
  if ok then return answer end
  local text = type(answer) == 'table' and answer.err or tostring(answer)
  if string.find(text, 'WRONGTYPE', 1, true) or string.find(text, 'DAMAGED', 1, true) then return 'd' end
  error(answer, 0)
end

local answers, place, at = {}, 0, 1
while number == '' and ARGV[at] == 'S' and ARGV[at + 11] == '' do
  local answer = attempt(save_plain, at + 2)
  if not answer then break end
  if answer ~= '' then answers[#answers + 1] = place .. '=' .. answer end
  place, at = place + 1, at + 12
end
if not ARGV[at] then return table.concat(answers, ' ') end

