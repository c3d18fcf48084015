-- The messages of an execution that wait, number and message in turn. ARGV: id.

return call('HGETALL', base .. 'm:' .. ARGV[1])
