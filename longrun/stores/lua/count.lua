-- How many members some sorted sets have. ARGV: lowest and highest score as ZCOUNT takes them, names of the sets.
-- Answers 1 if what expired may be among them, so that the caller has to ask again, -1 if it is and stays, or 0; then the
-- numbers.

local counts = { tidied() }
for n = 3, #ARGV do counts[#counts + 1] = call('ZCOUNT', base .. ARGV[n], ARGV[1], ARGV[2]) end
return counts
