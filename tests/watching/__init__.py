"""Contains the definitions of the chart's dashboards, their JSON, their pictures and their tests."""
