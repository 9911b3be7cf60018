"""What the entry scripts run."""
