# The world of map.json: solid boxes to collide with, and flat zones on the ground.
#
# All solid boxes are shapes of one body. Bullet goes through the shapes of one body in a fixed
# order, but through bodies in one that depends on all that has moved before: with a body for each
# box, an avatar in a corner would not move alike in two processes.
extends Spatial

enum { NOTHING, SOLID, LAVA, WATER, PAD }
const ZONES = {"lava": LAVA, "water": WATER, "pads": PAD}
const GROUND_LAYER = 1
const ZONE_LAYER = 2  # seen by rays, passed through by avatars
const ZONE_HEIGHT = 0.05
const GRID = 0.5  # metres: corners of zones lie on multiples of it

var map = {}  # map.json
var half = 0.0  # metres from the middle to the edge
var kinds = {}  # id of a body -> what a ray that hits it sees
var zone_grid = PoolByteArray()
var grid_side = 0


func build(path):
	var file = File.new()
	if file.open(path, File.READ) != OK:
		printerr("world.gd: cannot read ", path)
		return false
	var parsed = JSON.parse(file.get_as_text())
	if parsed.error != OK:
		printerr("world.gd: %s line %d: %s" % [path, parsed.error_line, parsed.error_string])
		return false
	map = parsed.result
	half = map.size / 2
	grid_side = int(map.size / GRID)
	zone_grid.resize(grid_side * grid_side)
	for i in range(zone_grid.size()):
		zone_grid[i] = NOTHING

	var ground = add_body(GROUND_LAYER, SOLID)
	for box in solid_boxes():
		add_box(ground, box)
	for name in ZONES:
		var body = add_body(ZONE_LAYER, ZONES[name])
		for zone in map[name]:
			add_box(body, zone + [0.0, ZONE_HEIGHT])
			for row in range(cell(zone[1]), cell(zone[3])):
				for column in range(cell(zone[0]), cell(zone[2])):
					zone_grid[row * grid_side + column] = ZONES[name]
	return true


# The boxes as [x0, z0, x1, z1, bottom, top]: ground, outer walls, and what the map lists.
func solid_boxes():
	var boxes = [[-half - 1, -half - 1, half + 1, half + 1, -1.0, 0.0]]
	for side in [
		[-half - 1, -half - 1, half + 1, -half], [-half - 1, half, half + 1, half + 1],
		[-half - 1, -half, -half, half], [half, -half, half + 1, half]
	]:
		boxes.append(side + [0.0, map.outer_wall_height])
	for wall in map.walls:
		boxes.append(wall + [0.0, map.wall_height])
	for platform in map.platforms:
		boxes.append(platform.slice(0, 3) + [0.0, platform[4]])
	return boxes


func add_body(layer, kind):
	var body = StaticBody.new()
	body.collision_layer = layer
	body.collision_mask = 0
	add_child(body)
	kinds[body.get_instance_id()] = kind
	return body


func add_box(body, box):
	var shape = BoxShape.new()
	shape.extents = Vector3(box[2] - box[0], box[5] - box[4], box[3] - box[1]) / 2
	var node = CollisionShape.new()
	node.shape = shape
	node.translation = Vector3(box[0] + box[2], box[4] + box[5], box[1] + box[3]) / 2
	body.add_child(node)


func cell(metres):
	return int(floor((metres + half) / GRID))


# What lies on the ground at a place.
func zone_at(x, z):
	var row = int((z + half) / GRID)
	var column = int((x + half) / GRID)
	if row < 0 or row >= grid_side or column < 0 or column >= grid_side:
		return NOTHING
	return zone_grid[row * grid_side + column]
