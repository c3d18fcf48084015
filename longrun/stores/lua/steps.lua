-- What most calls hold and nothing else: steps of an owner. These are tried before anything else of the commit script is
-- even defined, which takes the server longer than to save a step; starts and ends (`starts.lua`) come next.
-- ARGV is what `commit.lua` says; below, it is the list of writes. What is tried does all of a write, or nothing and
-- answers nil: then the rest of the script sees to it.

local caller, number, ttl = ARGV[1], ARGV[2], ARGV[3]
if number ~= '' then
  local answered = recall(caller, number)
  if answered then return answered end
end
local ARGV = cmsgpack.unpack(ARGV[4])
local answers, place, at = {}, 0, 1

-- A record that somebody else broke refuses its own write; what the server refuses, it refuses for all of them.
local function attempt(write, ...)
  local ok, answer = pcall(write, ...)
  if ok then return answer end
  local text = type(answer) == 'table' and answer.err or tostring(answer)
  if string.find(text, 'WRONGTYPE', 1, true) or string.find(text, 'DAMAGED', 1, true) then return 'd' end
  error(answer, 0)
end

local function call_with_all(command, key, values)
  for from = 1, #values, 1000 do call(command, key, unpack(values, from, math.min(from + 999, #values))) end
end

-- The row first: if that cannot be written, the head stays where it was. Who stops may leave no state.
local function put_step(at)
  local x = base .. 'x:' .. ARGV[at]
  call('HSET', base .. 'b:' .. ARGV[at], ARGV[at + 5], ARGV[at + 6])
  if ARGV[at + 8] == '' then
    call('HSET', x, 'c', ARGV[at + 1], 'h', ARGV[at + 4])
  else
    call('HSET', x, 'c', ARGV[at + 1], 'h', ARGV[at + 4], ARGV[at + 7], ARGV[at + 8])
  end
end

local function strip(id, from)
  local gone = {}
  local kept, fields = states_of(id)
  for _, seq in ipairs(kept) do
    if seq < from then gone[#gone + 1] = fields[seq] end
  end
  call_with_all('HDEL', base .. 'x:' .. id, gone)
end

-- ARGV: id, control, " <fence> <revision before> ", the end of the control record from <woken> on, head, seq, row,
-- "s" and seq, state, keep_from or "". Only if the old record has that fence and revision and the same end: then no index
-- changes and no pattern is needed.
local function save_plain(at)
  local before, tail, keep = ARGV[at + 2], ARGV[at + 3], ARGV[at + 9]
  local old = call('HGET', base .. 'x:' .. ARGV[at], 'c')
  if not old or sub(old, 9, 8 + #before) ~= before or sub(old, -#tail) ~= tail then return nil end
  put_step(at)
  if keep ~= '' then strip(ARGV[at], tonumber(keep)) end
  return ''
end

local function answered(answer)
  if answer ~= '' then answers[#answers + 1] = place .. '=' .. answer end
  place, at = place + 1, at + 2 + tonumber(ARGV[at + 1])
end

while ARGV[at] == 'S' do
  local answer = attempt(save_plain, at + 2)
  if not answer then break end
  answered(answer)
end
if not ARGV[at] then return table.concat(answers, ' ') end
