# Draws the world into a PNG file and quits. Needs a display, real or Xvfb.
extends Node

const COLORS = {
	"ground": Color(0.80, 0.78, 0.72), "walls": Color(0.36, 0.38, 0.42),
	"platforms": Color(0.72, 0.58, 0.36), "lava": Color(0.90, 0.26, 0.08),
	"water": Color(0.22, 0.50, 0.86), "pads": Color(0.15, 0.70, 0.30)
}
const FRAMES = 5  # until everything is drawn

var world
var path = ""
var frames = 0


func setup(a_world, a_path):
	world = a_world
	path = a_path


func _ready():
	OS.window_size = Vector2(1280, 800)
	var half = world.half
	show_box([-half, -half, half, half, -1.0, 0.0], "ground")
	for wall in world.map.walls:
		show_box(wall + [0.0, world.map.wall_height], "walls")
	for platform in world.map.platforms:
		show_box(platform.slice(0, 3) + [0.0, platform[4]], "platforms")
	for name in world.ZONES:
		for zone in world.map[name]:
			show_box(zone + [0.0, 0.15], name)
	for side in [[-half - 1, -half - 1, half + 1, -half], [-half - 1, half, half + 1, half + 1],
			[-half - 1, -half, -half, half], [half, -half, half + 1, half]]:
		show_box(side + [0.0, 2.0], "walls")  # cut low, to see over them

	var camera = Camera.new()
	camera.far = 500
	camera.fov = 38
	camera.look_at_from_position(Vector3(0, 140, 100), Vector3(0, 0, 3), Vector3.UP)
	camera.current = true
	add_child(camera)

	var sun = DirectionalLight.new()
	sun.rotation_degrees = Vector3(-55, -35, 0)
	sun.light_energy = 0.75
	sun.shadow_enabled = true
	sun.directional_shadow_max_distance = 300
	add_child(sun)
	var sky = Environment.new()
	sky.background_mode = Environment.BG_COLOR
	sky.background_color = Color(1, 1, 1)
	sky.ambient_light_color = Color(1, 1, 1)
	sky.ambient_light_energy = 0.45
	var around = WorldEnvironment.new()
	around.environment = sky
	add_child(around)


func show_box(box, name):
	var material = SpatialMaterial.new()
	material.albedo_color = COLORS[name]
	material.roughness = 1.0
	var cube = CubeMesh.new()
	cube.size = Vector3(box[2] - box[0], box[5] - box[4], box[3] - box[1])
	cube.material = material
	var node = MeshInstance.new()
	node.mesh = cube
	node.translation = Vector3(box[0] + box[2], box[4] + box[5], box[1] + box[3]) / 2
	add_child(node)


func _process(_delta):
	frames += 1
	if frames < FRAMES:
		return
	set_process(false)
	var image = get_viewport().get_texture().get_data()
	image.flip_y()
	var error = image.save_png(path)
	if error != OK:
		printerr("picture.gd: cannot write ", path)
	get_tree().quit(0 if error == OK else 1)
