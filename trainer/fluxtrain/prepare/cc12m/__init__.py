"""CC12M for MLPerf, cleaned like the reference's."""
