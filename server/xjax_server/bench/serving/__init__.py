"""Servers under load, seen from outside.

prompts    what is sent: exact lengths, a shared prefix, new in every repetition
client     one streamed request and when its tokens came
load       many of them: so many at once, or at random times of a given rate
measure    times and counts of a repetition, made into figures
run        cases, repetitions and servers in turn
servers    child processes that serve, ours and peers, and the settings that peers are tried with
null       a server that computes nothing, to see what the load client itself takes
report     the tables
"""
