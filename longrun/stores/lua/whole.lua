-- Everything of an execution, for scripts that answer with that.
-- `load` adds to `values`: control, head, definition, step names, index record, then five lists, each with its length
-- first: rows, states, blobs, entries, messages. Only a false for one that is not there.

local room = 0 -- bytes after which no further one is to be begun
local all = false -- every state and blob that is kept, or the newest state and its blobs

-- Names of blobs stand at the front of a boundary's row, after its checksum: "<crc> <length> <JSON list>".
local function blob_names(row)
  local length, from = match(row or '', '^%x+ (%d+) ()')
  if not length or length == '0' then return {} end
  local ok, names = pcall(cjson.decode, sub(row, from, from + tonumber(length) - 1))
  return ok and type(names) == 'table' and names or {}
end

local function chosen(key, fields)
  local found = {}
  for from = 1, #fields, 1000 do
    local slice = { unpack(fields, from, math.min(from + 999, #fields)) }
    for n, value in ipairs(call('HMGET', key, unpack(slice))) do
      if value then
        room = room - #value
        found[#found + 1] = slice[n]
        found[#found + 1] = value
      end
    end
  end
  return found
end

local function every(key)
  local found = call('HGETALL', key)
  for n = 2, #found, 2 do room = room - #found[n] end
  return found
end

local values = {}

local function add(list)
  values[#values + 1] = text_of(#list)
  for _, value in ipairs(list) do values[#values + 1] = value end
end

local function load(id)
  local found = call('HMGET', base .. 'x:' .. id, 'c', 'h', 'd', 't', 'g')
  if not found[1] then
    values[#values + 1] = false
    return
  end
  for n = 1, 5 do values[#values + 1] = found[n] end
  local numbers, fields = {}, {}
  local seqs, field_of = states_of(id)
  for n, seq in ipairs(seqs) do
    fields[n] = field_of[seq]
    numbers[n] = sub(fields[n], 2)
  end
  local rows = chosen(base .. 'b:' .. id, numbers)
  add(rows)
  add(chosen(base .. 'x:' .. id, all and fields or { fields[#fields] }))
  add(all and every(base .. 'o:' .. id) or chosen(base .. 'o:' .. id, blob_names(rows[#rows])))
  add(every(base .. 'e:' .. id))
  add(every(base .. 'm:' .. id))
end
