"""Random Python worlds, and programs on them, captured and held against eager on a twin world."""
