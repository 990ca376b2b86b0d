"""Tables and figures of the papers that fastgen builds on, measured on the present machine.

The baselines are the current unpatched toolkits. Models have the shapes of the papers and random
weights unless stated otherwise. Figures that a paper printed are kept in the code, with the
hardware that it used. Machines and baselines differ, so ratios are comparable and times are not.
"""
