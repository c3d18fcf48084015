-- A page of executions from some sorted sets of the listing, newest first (creation time, then id, descending).
-- ARGV: limit, creation time and id of the row before, or "" and "", lowest creation time or "-inf", creation time that
-- none may reach or "+inf", how many texts follow that a definition must hold, these, names of the sorted sets.
-- Answers where it stopped (creation time and id, or "" and "" when there is no more), then id, creation time, control,
-- head, definition in turn.

local limit, after, after_id = tonumber(ARGV[1]), ARGV[2], ARGV[3]
local lowest, under, texts = ARGV[4], ARGV[5], tonumber(ARGV[6])
local PAGE = 128
local MOST = 2000 -- rows looked at in one call: others want the server too

tidied()

-- Whether a row at this place comes at or before the one where the last page ended.
local function seen(score, id)
  local created, before = tonumber(score), tonumber(after)
  if created ~= before then return created > before end
  return id == after_id or precedes(after_id, id)
end

-- How many rows of a set were on earlier pages: found by halving, since the row itself may be gone.
local function skipped(key)
  local low, high = 0, call('ZCARD', key)
  while low < high do
    local middle = math.floor((low + high) / 2)
    local row = call('ZREVRANGE', key, middle, middle, 'WITHSCORES')
    if seen(row[2], row[1]) then low = middle + 1 else high = middle end
  end
  return low
end

local sources = {}
for n = 7 + texts, #ARGV do
  local key = base .. ARGV[n]
  local from = under == '+inf' and 0 or call('ZCOUNT', key, under, '+inf')
  if after ~= '' then from = math.max(from, skipped(key)) end
  sources[#sources + 1] = { key = key, from = from, page = {}, n = 1 }
end

local function refill(source)
  source.page = call('ZREVRANGE', source.key, source.from, source.from + PAGE - 1, 'WITHSCORES')
  source.from = source.from + PAGE
  source.done = #source.page < 2 * PAGE
  source.n = 1
end

local function newest()
  local best, best_id, best_score
  for _, source in ipairs(sources) do
    if source.n > #source.page and not source.done then refill(source) end
    local id, score = source.page[source.n], tonumber(source.page[source.n + 1] or '')
    if id and (not best or score > best_score or (score == best_score and precedes(best_id, id))) then
      best, best_id, best_score = source, id, score
    end
  end
  return best, best_id, best_score
end

local function fits(definition)
  for n = 7, 6 + texts do
    if definition and not string.find(definition, ARGV[n], 1, true) then return false end
  end
  return true
end

local least = lowest == '-inf' and -math.huge or tonumber(lowest)
local found, stray, looked = { '', '' }, {}, 0
while true do
  local source, id, score = newest()
  if not source or score < least then break end
  local text = source.page[source.n + 1]
  if #found - 2 >= 5 * limit or looked >= MOST then
    found[1], found[2] = after, after_id
    break
  end
  source.n = source.n + 2
  looked = looked + 1
  after, after_id = text, id
  local row = call('HMGET', base .. 'x:' .. id, 'c', 'h', 'd')
  if not row[1] then
    stray[#stray + 1] = { source.key, id }
  elseif fits(row[3]) then
    for _, value in ipairs({ id, text, row[1], row[2], row[3] }) do found[#found + 1] = value end
  end
end
for _, pair in ipairs(stray) do redis.pcall('ZREM', pair[1], pair[2]) end
return packed(found)
