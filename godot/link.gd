# The connection to Python, which listens on 127.0.0.1 and asks; the engine only answers.
#
# Frames in both directions: length as u32, little-endian, then as many bytes. The first frame is
# the hello, JSON. All others are the bytes of a PoolRealArray. A question begins with its kind:
#   [STEP, forward, turn, jump for each avatar]      `repeat` ticks of physics
#   [RESTART, (index, yaw) for any of the avatars]   begin an episode
#   [PLACE, state for each avatar]                   x, y, z, velocity, yaw, grounded
# Each is answered with the report of all avatars. The engine quits when the connection ends.
extends Node

enum { STEP, RESTART, PLACE }
const VERSION = 1
const STATE = 8
const CONNECT_MSEC = 10000
const Avatar = preload("res://avatar.gd")

var peer = StreamPeerTCP.new()
var avatars = []
var repeat = 1
var world
var port = 0


func setup(a_world, a_port, num_agents, a_repeat):
	world = a_world
	port = a_port
	repeat = a_repeat
	for _i in range(num_agents):
		var avatar = Avatar.new()
		avatar.setup(world)
		world.add_child(avatar)
		avatar.restart(0.0)
		avatars.append(avatar)


func _ready():
	var error = peer.connect_to_host("127.0.0.1", port)
	var start = OS.get_ticks_msec()
	while error == OK and peer.get_status() == StreamPeerTCP.STATUS_CONNECTING:
		if OS.get_ticks_msec() - start > CONNECT_MSEC:
			break
		OS.delay_msec(1)
	if error != OK or not connected():
		leave("cannot connect to port %d" % port, 3)
		return
	peer.set_no_delay(true)
	var hello = {
		"version": VERSION, "engine": Engine.get_version_info().string,
		"agents": avatars.size(), "repeat": repeat, "map": world.map,
		"rays": avatars[0].directions.size(), "ray_length": Avatar.RAY_LENGTH,
		"physics": ProjectSettings.get_setting("physics/3d/physics_engine")
	}
	send(JSON.print(hello).to_utf8())


func connected():
	return peer.get_status() == StreamPeerTCP.STATUS_CONNECTED


func leave(message, status):
	if message:
		printerr("link.gd: ", message)
	set_physics_process(false)
	get_tree().quit(status)


func send(bytes):
	peer.put_u32(bytes.size())
	peer.put_data(bytes)


func _physics_process(delta):
	var size = peer.get_u32()  # waits; 0 where Python has gone
	if size == 0 or not connected():
		leave("", 0)
		return
	var frame = peer.get_data(size)
	if frame[0] != OK:
		leave("", 0)
		return
	answer(bytes2var(frame[1]), delta)


func answer(question, delta):
	var kind = int(question[0])
	if kind == STEP:
		for _k in range(repeat):
			var at = 1
			for avatar in avatars:
				avatar.tick(question[at], question[at + 1], question[at + 2], delta)
				at += 3
	elif kind == RESTART:
		for at in range(1, question.size(), 2):
			avatars[int(question[at])].restart(question[at + 1])
	elif kind == PLACE:
		var at = 1
		for avatar in avatars:
			avatar.place(
				Vector3(question[at], question[at + 1], question[at + 2]),
				Vector3(question[at + 3], question[at + 4], question[at + 5]),
				question[at + 6], question[at + 7] > 0.5)
			at += STATE
	else:
		leave("unknown question %d" % kind, 4)
		return
	var out = []
	for avatar in avatars:
		avatar.report(out)
	send(var2bytes(PoolRealArray(out)))
