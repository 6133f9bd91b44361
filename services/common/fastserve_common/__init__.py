"""What every FastServe process shares: settings, lifecycle, logs, channels, errors, cluster state."""
