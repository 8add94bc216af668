"""Review of MLPerf runs, results and packages by the rules that MLCommons' tools do not check."""
