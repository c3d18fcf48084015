-- One boundary with its state and all blobs that are kept, or nothing. ARGV: id, number.

local id, seq = ARGV[1], ARGV[2]
local state = call('HGET', base .. 'x:' .. id, 's' .. seq)
if not state then return false end
return { call('HGET', base .. 'b:' .. id, seq), state, call('HGETALL', base .. 'o:' .. id) }
