-- Everything of some executions, each consistent in itself.
-- ARGV: bytes after which no further one is begun, "all" (every state and blob that is kept) or "" (the newest state and
-- its blobs), ids. Answers for each id that was read, in order, what `whole.lua` says of it.

room, all = tonumber(ARGV[1]), ARGV[2] == 'all'
for n = 3, #ARGV do
  load(ARGV[n])
  if room < 0 then break end
end
return packed(values)
