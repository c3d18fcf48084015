-- Remove finished executions with all they have. ARGV: name of the caller, number of the call, ids.
-- Answers a text with "1" or "0" for each.

local answered = recall(ARGV[1], ARGV[2])
if answered then return answered end

local function delete(id)
  local found = call('HMGET', base .. 'x:' .. id, 'c', 'g')
  local f = facts(found[2])
  if not found[1] or not f then return '0' end
  local part = { match(found[1], CONTROL) }
  if not part[1] or not FINISHED[part[8]] then return '0' end
  leave_claims(id, f, part[8], part[9], part[10], part[6])
  leave_listing(id, f, part[8])
  leave_expiry(id, f)
  if part[10] ~= '-' then call('SREM', base .. 'i:mail:' .. part[10], id) end
  for _, kind in ipairs(PARTS) do call('UNLINK', base .. kind .. id) end
  free(id)
  return '1'
end

local answers = {}
for n = 3, #ARGV do answers[#answers + 1] = delete(ARGV[n]) end
local reply = table.concat(answers)
remember(ARGV[1], ARGV[2], reply)
return reply
