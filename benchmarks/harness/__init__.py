"""Parts of every benchmark: options, environment, timing, tables, records, plots."""
