-- The earliest moment at which something that nobody owns becomes due, or nothing.

return call('ZRANGE', base .. 'i:due', 0, 0, 'WITHSCORES')[2] or false
