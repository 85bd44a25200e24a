"""pagetile inside other libraries: each module needs its library and is imported by its user."""
