"""From waiting requests to step plans: the loop in `scheduler`, its choices in small policies beside it."""
