"""Pipeline schedules as data: who does which part of a training step in which order.

A `table` is a row of actions for each device. Tables are made by the `registry` of schedules, read
from `files`, and `verify` says whether one can be executed and what it needs; `times` says how long
it takes. Nothing here knows a program: a stage is a number.
"""
