-- How many members some sorted sets have. ARGV: lowest and highest score as ZCOUNT takes them, names of the sets.

sweep()
local counts = {}
for n = 3, #ARGV do counts[#counts + 1] = call('ZCOUNT', base .. ARGV[n], ARGV[1], ARGV[2]) end
return counts
