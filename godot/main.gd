# Reads the command line and starts what it asks for, with the world built from map.json:
#   --port=P --agents=N --repeat=K    play N avatars for the Python process that listens on port P
#   --picture=FILE.png                draw the world into a file (needs a display) and quit
extends Node

const Link = preload("res://link.gd")
const Picture = preload("res://picture.gd")


func _ready():
	var options = {"port": "", "agents": "1", "repeat": "8", "picture": ""}
	for word in OS.get_cmdline_args():
		var parts = word.trim_prefix("--").split("=", true, 1)
		if parts.size() == 2 and options.has(parts[0]):
			options[parts[0]] = parts[1]
	var world = $World
	if not world.build("res://map.json"):
		get_tree().quit(1)
		return
	var task
	if options.picture:
		task = Picture.new()
		task.setup(world, options.picture)
	elif options.port:
		task = Link.new()
		task.setup(world, int(options.port), int(options.agents), int(options.repeat))
	else:
		printerr("main.gd: --port=P or --picture=FILE.png is needed")
		get_tree().quit(1)
		return
	add_child(task)
