// Package config is the daemon's configuration: defaults, then a YAML file, then
// flags, validated as a whole. The daemon and `crust-proxy validate` load it in the
// same way.
package config

import (
	"cmp"
	"encoding/json"
	"fmt"
	"path/filepath"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Config is everything that can be set. Every path is here, so that several
// daemons can run side by side.
type Config struct {
	// RunDir holds sockets and state; it must be on tmpfs.
	RunDir string `json:"runDir"`
	// KubeletRoot is the directory below which all targets lie.
	KubeletRoot string `json:"kubeletRoot"`
	// RuntimeSocket serves drivers and orchestrators, AdminSocket operators.
	// Sockets passed by systemd replace them.
	RuntimeSocket Socket        `json:"runtimeSocket"`
	AdminSocket   Socket        `json:"adminSocket"`
	Authorization Authorization `json:"authorization"`
	Devices       Devices       `json:"devices"`
	Handlers      Handlers      `json:"handlers"`
	Front         Front         `json:"front"`
	Policy        Policy        `json:"policy"`
	Cluster       Cluster       `json:"cluster"`
	Containerd    Containerd    `json:"containerd"`
	CRI           CRI           `json:"cri"`
	Relay         Relay         `json:"relay"`
	// ReconcileInterval is how often every record is compared with the node; 0
	// is never.
	ReconcileInterval Duration `json:"reconcileInterval"`
	HTTP              HTTP     `json:"http"`
	Tracing           Tracing  `json:"tracing"`
	Log               Log      `json:"log"`
	// ShutdownTimeout is how long calls under way may take to end.
	ShutdownTimeout Duration `json:"shutdownTimeout"`
}

// Socket is a unix socket of ours.
type Socket struct {
	// Path is below the run directory by default.
	Path string `json:"path"`
	// Mode is "0600" or "0660".
	Mode string `json:"mode"`
	// Group owns the socket, by name or number; empty is the daemon's group.
	Group string `json:"group"`
}

// Authorization is who may call each API, by the peer credentials from the kernel.
type Authorization struct {
	Runtime Callers `json:"runtime"`
	Admin   Callers `json:"admin"`
	// CSI is who may call the sockets of the front: kubelet, and the sidecars that
	// register drivers.
	CSI Callers `json:"csi"`
}

// Callers is a set of users and groups.
type Callers struct {
	UIDs []uint32 `json:"uids"`
	GIDs []uint32 `json:"gids"`
}

// Devices says which devices are accepted.
type Devices struct {
	// Roots are the directories below which device nodes may lie; by default /dev and
	// the plugins directory below the kubelet root.
	Roots []string `json:"roots"`
	// Images are the directories below which disk images may lie; none means that
	// no image is accepted.
	Images []string `json:"images"`
	// Classes are block drivers as in /proc/devices; none means all.
	Classes []string `json:"classes"`
	// Servers are programs that serve a device and therefore have it open, by the name of
	// their executable file. They do not count as its users.
	Servers []string `json:"servers"`
}

// Containerd is the container runtime whose sandboxes are followed.
type Containerd struct {
	// Socket is containerd's; empty is off.
	Socket    string `json:"socket"`
	Namespace string `json:"namespace"`
}

// Relay bounds what is asked of sandboxes.
type Relay struct {
	StatsTimeout  Duration `json:"statsTimeout"`
	ExpandTimeout Duration `json:"expandTimeout"`
	// Concurrency bounds the requests under way. One that takes longer than SlowAfter
	// counts as slow; MaxSlow bounds these.
	Concurrency int      `json:"concurrency"`
	SlowAfter   Duration `json:"slowAfter"`
	MaxSlow     int      `json:"maxSlow"`
}

// HTTP serves metrics and health.
type HTTP struct {
	// Listen is "host:port", "unix:/path", or empty for off.
	Listen string `json:"listen"`
	// Pprof adds Go's profiles, which reveal internals of the process.
	Pprof bool `json:"pprof"`
}

// Tracing sends spans by OTLP over gRPC.
type Tracing struct {
	// Endpoint is "host:port"; empty is off.
	Endpoint    string  `json:"endpoint"`
	Insecure    bool    `json:"insecure"`
	SampleRatio float64 `json:"sampleRatio"`
}

// Log sets the log's level.
type Log struct {
	// Level is debug, info, warn or error.
	Level string `json:"level"`
}

// Duration is written as Go writes it: "1m30s".
type Duration time.Duration

// MarshalJSON writes the duration as text.
func (d Duration) MarshalJSON() ([]byte, error) { return json.Marshal(time.Duration(d).String()) }

// UnmarshalJSON reads a duration from text, or the number 0.
func (d *Duration) UnmarshalJSON(raw []byte) error {
	var value any
	err := json.Unmarshal(raw, &value)
	if err == nil && value != nil { // a key without a value keeps its default
		*d, err = durationOf(value)
	}
	return err
}

func durationOf(value any) (Duration, error) {
	if number, ok := value.(float64); ok && number == 0 {
		return 0, nil
	}
	text, ok := value.(string)
	if !ok {
		return 0, fmt.Errorf("%v is not a duration: write one like \"10s\"", value)
	}
	parsed, err := time.ParseDuration(text)
	if err != nil {
		return 0, fmt.Errorf("%q is not a duration: write one like \"10s\"", text)
	}
	return Duration(parsed), nil
}

// Std is the duration for the standard library.
func (d Duration) Std() time.Duration { return time.Duration(d) }

// Default is the configuration of a daemon without file and flags.
func Default() Config { return base().complete() }

// complete sets the defaults that depend on other keys, so that one key moves a whole
// daemon.
func (c Config) complete() Config {
	c.RuntimeSocket.Path = cmp.Or(c.RuntimeSocket.Path, filepath.Join(c.RunDir, "runtime.sock"))
	c.AdminSocket.Path = cmp.Or(c.AdminSocket.Path, filepath.Join(c.RunDir, "admin.sock"))
	if c.Devices.Roots == nil {
		c.Devices.Roots = []string{"/dev", filepath.Join(c.KubeletRoot, "plugins")}
	}
	c.Handlers.complete()
	c.Front.complete(c.KubeletRoot)
	return c
}

// base returns the defaults that depend on no other key.
func base() Config {
	root := Callers{UIDs: []uint32{0}, GIDs: []uint32{}}
	return Config{
		RunDir: "/run/crust-proxy", KubeletRoot: "/var/lib/kubelet",
		RuntimeSocket: Socket{Mode: "0600"},
		AdminSocket:   Socket{Mode: "0600"},
		Authorization: Authorization{Runtime: root, Admin: root, CSI: root},
		Devices: Devices{
			Images: []string{}, Classes: []string{},
			Servers: []string{"multipathd", "nbd-client", "qemu-nbd", "rbd-nbd", "tcmu-runner"},
		},
		Handlers:   baseHandlers(),
		Front:      Front{DefaultFSType: "ext4", DriverTimeout: Duration(2 * time.Minute)},
		Policy:     Policy{Format: volume.FormatHost, Runtimes: baseRuntimes(), Rules: []policy.Rule{}},
		Containerd: Containerd{Socket: "/run/containerd/containerd.sock", Namespace: "k8s.io"},
		Relay: Relay{
			StatsTimeout: Duration(10 * time.Second), ExpandTimeout: Duration(time.Minute),
			Concurrency: 64, SlowAfter: Duration(time.Second), MaxSlow: 1024,
		},
		ReconcileInterval: Duration(time.Minute),
		HTTP:              HTTP{Listen: "127.0.0.1:9814"},
		Tracing:           Tracing{SampleRatio: 1},
		Log:               Log{Level: "info"},
		ShutdownTimeout:   Duration(20 * time.Second),
	}
}

// StateDir is where the records are.
func (c Config) StateDir() string { return filepath.Join(c.RunDir, "state") }

// YAML encodes the configuration.
func (c Config) YAML() (string, error) {
	raw, err := yaml.Marshal(c)
	return string(raw), err
}
