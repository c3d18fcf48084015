-- Rows of boundaries behind a number, oldest first. ARGV: id, number, limit.
-- Answers {rows as number and row in turn, numbers of those that have their state}.

local id, after, limit = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local rows = base .. 'b:' .. id
local PAGE = 500

local control = call('HGET', base .. 'x:' .. id, 'c')
if not control then return { {}, {} } end
local newest = tonumber((select(5, match(control, CONTROL)))) or call('HLEN', rows)
local found, from = {}, after + 1
while from <= newest and #found < 2 * limit do
  local to = math.min(newest, from + math.min(PAGE, limit) - 1)
  local numbers = {}
  for seq = from, to do numbers[#numbers + 1] = string.format('%.0f', seq) end
  for n, row in ipairs(call('HMGET', rows, unpack(numbers))) do
    if row and #found < 2 * limit then
      found[#found + 1] = numbers[n]
      found[#found + 1] = row
    end
  end
  from = to + 1
end
return { found, (states_of(id)) }
