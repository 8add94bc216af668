"""``spec.run``: the RunConfig, its presets and rules."""
