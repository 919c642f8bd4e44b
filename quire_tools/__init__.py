"""Tools that look at a Quire system: tour, top, lab, bench, plan, doctor, convert, replay, simulation.

They may import everything; nothing that serves imports them. `quire.cli` loads their commands by name.
"""
