"""What a run leaves behind: metrics, resolved config, versions, trace, stage times, progress. No torch."""
