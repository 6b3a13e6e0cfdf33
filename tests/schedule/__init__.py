"""Pipeline schedules."""
