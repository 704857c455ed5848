"""Calls of captured programs: guards, stages, write-backs. Does not depend on how programs are captured."""
