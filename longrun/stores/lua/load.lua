-- Everything of some executions, each consistent in itself.
-- ARGV: bytes after which no further one is begun, "all" (every state and blob that is kept) or "" (the newest state and
-- its blobs), ids. Answers a list for each id that was read, in order; false for one that is not there.

local room, all = tonumber(ARGV[1]), ARGV[2] == 'all'

-- Names of blobs stand at the front of a boundary's row, after its checksum: "<crc> <length> <JSON list>".
local function blob_names(row)
  local length, from = match(row or '', '^%x+ (%d+) ()')
  if not length or length == '0' then return {} end
  local ok, names = pcall(cjson.decode, sub(row, from, from + tonumber(length) - 1))
  return ok and type(names) == 'table' and names or {}
end

local function chosen(key, fields)
  local found = {}
  for _, field in ipairs(fields) do
    local value = call('HGET', key, field)
    if value then
      room = room - #value
      found[#found + 1] = field
      found[#found + 1] = value
    end
  end
  return found
end

local function every(key)
  local found = call('HGETALL', key)
  for n = 2, #found, 2 do room = room - #found[n] end
  return found
end

local function load(id)
  local found = call('HMGET', base .. 'x:' .. id, 'c', 'h', 'd', 't', 'g')
  if not found[1] then return false end
  local kept = call('HKEYS', base .. 's:' .. id)
  table.sort(kept, function(a, b) return (tonumber(a) or 0) < (tonumber(b) or 0) end)
  local rows = chosen(base .. 'b:' .. id, kept)
  found[6] = rows
  found[7] = all and every(base .. 's:' .. id) or chosen(base .. 's:' .. id, { kept[#kept] })
  found[8] = all and every(base .. 'o:' .. id) or chosen(base .. 'o:' .. id, blob_names(rows[#rows]))
  found[9] = every(base .. 'e:' .. id)
  found[10] = every(base .. 'm:' .. id)
  return found
end

local answers = {}
for n = 3, #ARGV do
  answers[#answers + 1] = load(ARGV[n])
  if room < 0 then break end
end
return answers
