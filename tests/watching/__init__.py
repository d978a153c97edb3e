"""What the chart's dashboards are made from, and what tests them: definitions, their JSON, their pictures."""
