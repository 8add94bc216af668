"""CC12M for MLPerf, cleaned as the reference cleans it."""
