# One avatar: it runs, turns and jumps, and looks around with rays. Avatars do not touch each other.
#
# Its whole state is place, velocity, yaw and grounded, all of them 32-bit floats, which is what
# the connection carries: a state that was sent and set again goes on as if it had never left.
extends KinematicBody

const UP = Vector3(0, 1, 0)
const LEVEL_RAYS = 16  # all round
const DOWN_RAYS = 8  # all round, to the ground about four metres away
const DOWN_SLOPE = -0.2
const RAY_LENGTH = 30.0
const MAX_SLIDES = 4
const ZONE_REACH = 0.3  # metres above the ground up to which a zone acts
const SEEN_LAYERS = 3

var world
var rules  # map.rules
var feet = 0.0  # from the middle of the body down to its feet
var directions = []

var velocity = Vector3()
var yaw = 0.0  # 0 looks to -z, and turning left adds to it
var grounded = false
var dead = false


func setup(a_world):
	world = a_world
	rules = world.map.rules
	feet = rules.height / 2
	collision_layer = 0
	collision_mask = world.GROUND_LAYER
	var shape = CapsuleShape.new()
	shape.radius = rules.radius
	shape.height = rules.height - 2 * rules.radius
	var node = CollisionShape.new()
	node.shape = shape
	node.rotation = Vector3(PI / 2, 0, 0)  # Godot's capsules lie along z
	add_child(node)
	for i in range(LEVEL_RAYS):
		var angle = 2 * PI * i / LEVEL_RAYS
		directions.append(Vector3(sin(angle), 0, -cos(angle)) * RAY_LENGTH)
	for i in range(DOWN_RAYS):
		var angle = 2 * PI * i / DOWN_RAYS
		directions.append(Vector3(sin(angle), DOWN_SLOPE, -cos(angle)).normalized() * RAY_LENGTH)


func place(position, a_velocity, a_yaw, is_grounded):
	translation = position
	velocity = a_velocity
	yaw = a_yaw
	grounded = is_grounded
	dead = false


# Start an episode.
func restart(a_yaw):
	place(Vector3(world.map.spawn[0], feet, world.map.spawn[1]), Vector3(), a_yaw, true)


# One tick of physics with an action, each part in [-1, 1].
func tick(forward, turn, jump, delta):
	if dead:
		return
	yaw = wrapf(yaw - turn * rules.turn_speed * delta, -PI, PI)
	yaw = Vector2(yaw, 0).x  # to 32 bits
	var zone = standing_on()
	var speed = rules.speed * forward
	var jump_speed = rules.jump_speed
	if zone == world.WATER:
		speed *= rules.water_factor
		jump_speed *= rules.water_factor
	velocity.x = -sin(yaw) * speed
	velocity.z = -cos(yaw) * speed
	velocity.y -= rules.gravity * delta
	if grounded:
		if zone == world.PAD:
			velocity.y = rules.pad_speed
		elif jump > 0.0:
			velocity.y = jump_speed
	velocity = move_and_slide(velocity, UP, false, MAX_SLIDES)
	grounded = is_on_floor()
	dead = standing_on() == world.LAVA


func standing_on():
	var at = translation
	if at.y - feet > ZONE_REACH:
		return world.NOTHING
	return world.zone_at(at.x, at.z)


# Append the state, whether the avatar died, and the distance and kind of what each ray hits.
func report(out):
	var at = translation
	out.append(at.x)
	out.append(at.y)
	out.append(at.z)
	out.append(velocity.x)
	out.append(velocity.y)
	out.append(velocity.z)
	out.append(yaw)
	out.append(1.0 if grounded else 0.0)
	out.append(1.0 if dead else 0.0)
	var space = get_world().direct_space_state
	var turned = Basis(UP, yaw)
	var kinds = world.kinds
	for direction in directions:
		var hit = space.intersect_ray(at, at + turned.xform(direction), [], SEEN_LAYERS)
		if hit:
			out.append(at.distance_to(hit.position))
			out.append(kinds[hit.collider_id])
		else:
			out.append(RAY_LENGTH)
			out.append(world.NOTHING)
