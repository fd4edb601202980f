"""When it happens: machine profiles, event components, the engine, timelines, waits and reports."""
