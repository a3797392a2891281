// Package config is the daemon's configuration: defaults, then a YAML file, then flags,
// validated as a whole. The daemon and `crust-proxy validate` load it in the same way.
package config

import (
	"cmp"
	"encoding/json"
	"path/filepath"
	"reflect"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Config is everything that can be set. systemd/config.yaml describes each key. Every path is
// here, so that several daemons can run side by side.
type Config struct {
	RunDir            string        `json:"runDir"`
	KubeletRoot       string        `json:"kubeletRoot"`
	RuntimeSocket     Socket        `json:"runtimeSocket"`
	AdminSocket       Socket        `json:"adminSocket"`
	Authorization     Authorization `json:"authorization"`
	Devices           Devices       `json:"devices"`
	Handlers          Handlers      `json:"handlers"`
	Front             Front         `json:"front"`
	Policy            Policy        `json:"policy"`
	Cluster           Cluster       `json:"cluster"`
	Containerd        Containerd    `json:"containerd"`
	CRI               CRI           `json:"cri"`
	Relay             Relay         `json:"relay"`
	ReconcileInterval Duration      `json:"reconcileInterval"`
	HTTP              HTTP          `json:"http"`
	Tracing           Tracing       `json:"tracing"`
	Log               Log           `json:"log"`
	ShutdownTimeout   Duration      `json:"shutdownTimeout"`
}

// Socket is a unix socket of ours.
type Socket struct {
	Path  string `json:"path"`
	Mode  string `json:"mode"`
	Group string `json:"group"`
}

// Authorization is who may call each API, by the peer credentials from the kernel.
type Authorization struct {
	Runtime Callers `json:"runtime"`
	Admin   Callers `json:"admin"`
	CSI     Callers `json:"csi"`
}

// Callers is a set of users and groups.
type Callers struct {
	UIDs []uint32 `json:"uids"`
	GIDs []uint32 `json:"gids"`
}

// Devices says which devices are accepted.
type Devices struct {
	Roots   []string `json:"roots"`
	Images  []string `json:"images"`
	Classes []string `json:"classes"`
	Servers []string `json:"servers"`
}

// Handlers are the runtime handlers.
type Handlers struct {
	Default string `json:"default"`
	Kata    Kata   `json:"kata"`
	Crust   Crust  `json:"crust"`
}

// Kata is the handler for both Kata runtimes.
type Kata struct {
	Enabled         bool     `json:"enabled"`
	DirectVolumes   string   `json:"directVolumes"`
	GoSandboxes     string   `json:"goSandboxes"`
	RustSandboxes   string   `json:"rustSandboxes"`
	SharedSandboxes string   `json:"sharedSandboxes"`
	TempDir         string   `json:"tempDir"`
	Filesystems     []string `json:"filesystems"`
	EndOrphans      bool     `json:"endOrphans"`
}

// Crust is the handler for runtimes that speak the directory ABI, such as crust-runc.
type Crust struct {
	Enabled     bool     `json:"enabled"`
	Root        string   `json:"root"`
	TempDir     string   `json:"tempDir"`
	Programs    []string `json:"programs"`
	SocketDirs  []string `json:"socketDirs"`
	Filesystems []string `json:"filesystems"`
}

// Front stands between kubelet and CSI drivers.
type Front struct {
	Enabled         bool     `json:"enabled"`
	Registry        string   `json:"registry"`
	KubeletRegistry string   `json:"kubeletRegistry"`
	PrivateDir      string   `json:"privateDir"`
	MarksDir        string   `json:"marksDir"`
	DefaultFSType   string   `json:"defaultFSType"`
	AcceptLeftovers bool     `json:"acceptLeftovers"`
	AbandonVolumes  bool     `json:"abandonVolumes"`
	VolumeCondition bool     `json:"volumeCondition"`
	DriverTimeout   Duration `json:"driverTimeout"`
}

// Policy decides which CSI volumes are deferred.
type Policy struct {
	Format   volume.FormatPolicy `json:"format"`
	Runtimes map[string]string   `json:"runtimes"`
	Rules    []policy.Rule       `json:"rules"`
}

// Cluster is the Kubernetes cluster to ask about the pods of this node.
type Cluster struct {
	Kubeconfig string `json:"kubeconfig"`
	InCluster  bool   `json:"inCluster"`
	NodeName   string `json:"nodeName"`
}

// On reports whether a cluster is configured.
func (c Cluster) On() bool { return c.Kubeconfig != "" || c.InCluster }

// Containerd is the container runtime whose sandboxes are followed.
type Containerd struct {
	Socket    string `json:"socket"`
	Namespace string `json:"namespace,omitempty"` // of older files: not used any more
}

// CRI is another container runtime whose sandboxes are followed.
type CRI struct {
	Socket string `json:"socket"`
}

// Relay bounds what is asked of sandboxes.
type Relay struct {
	StatsTimeout  Duration `json:"statsTimeout"`
	ExpandTimeout Duration `json:"expandTimeout"`
	Concurrency   int      `json:"concurrency"`
	SlowAfter     Duration `json:"slowAfter"`
	MaxSlow       int      `json:"maxSlow"`
}

// HTTP serves metrics and health.
type HTTP struct {
	Listen string `json:"listen"`
	Pprof  bool   `json:"pprof"`
}

// Tracing sends spans by OTLP over gRPC.
type Tracing struct {
	Endpoint    string  `json:"endpoint"`
	Insecure    bool    `json:"insecure"`
	SampleRatio float64 `json:"sampleRatio"`
}

// Log sets the log's level.
type Log struct {
	Level string `json:"level"`
}

// Duration is written as Go writes it: "1m30s".
type Duration time.Duration

// MarshalJSON writes the duration as text.
func (d Duration) MarshalJSON() ([]byte, error) { return json.Marshal(d.Std().String()) }

// UnmarshalJSON reads a duration from text, or the number 0. A key without a value keeps its default.
func (d *Duration) UnmarshalJSON(raw []byte) error {
	var value any
	if err := json.Unmarshal(raw, &value); err != nil || value == nil {
		return err
	}
	text, ok := value.(string)
	if !ok && value == float64(0) {
		text = "0"
	}
	parsed, err := time.ParseDuration(text)
	if err != nil {
		// The decoder adds the key to an error of this type only.
		return &json.UnmarshalTypeError{Value: string(raw), Type: reflect.TypeFor[Duration]()}
	}
	*d = Duration(parsed)
	return nil
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
		Containerd: Containerd{Socket: "/run/containerd/containerd.sock"},
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

// The names of the handlers.
const (
	kataName  = "kata"
	crustName = "crust"
)

func baseHandlers() Handlers {
	return Handlers{
		Kata: Kata{
			Enabled: true, DirectVolumes: "/run/kata-containers/shared/direct-volumes",
			GoSandboxes: "/run/vc/sbs", RustSandboxes: "/run/kata",
			SharedSandboxes: "/run/kata-containers/shared/sandboxes", Filesystems: []string{"ext4", "xfs", "btrfs"},
			EndOrphans: true,
		},
		Crust: Crust{
			Root: "/run/crust", Programs: []string{"/usr/bin/crust-runc"}, SocketDirs: []string{"/run/crust-runc"},
			Filesystems: []string{"ext4", "xfs", "btrfs"},
		},
	}
}

func (h *Handlers) complete() {
	if h.Default == "" && !h.Kata.Enabled && h.Crust.Enabled {
		h.Default = crustName
	}
	if h.Default == "" {
		h.Default = kataName
	}
}

func (h Handlers) names() []string {
	var names []string
	if h.Kata.Enabled {
		names = append(names, kataName)
	}
	if h.Crust.Enabled {
		names = append(names, crustName)
	}
	return names
}

func (f *Front) complete(kubeletRoot string) {
	f.Registry = cmp.Or(f.Registry, filepath.Join(kubeletRoot, "crust-proxy/registry"))
	f.KubeletRegistry = cmp.Or(f.KubeletRegistry, filepath.Join(kubeletRoot, "plugins_registry"))
	f.MarksDir = cmp.Or(f.MarksDir, filepath.Join(kubeletRoot, "crust-proxy/marks"))
	csi := filepath.Join(kubeletRoot, "plugins/kubernetes.io/csi")
	if f.PrivateDir == "" || filepath.Clean(f.PrivateDir) == filepath.Join(csi, "crust-proxy.dev") { // the earlier default, in older files
		f.PrivateDir = filepath.Join(csi, "volumeDevices")
	}
}

// DeferralPolicy is the policy that decides.
func (c Config) DeferralPolicy() *policy.Policy { return c.Policy.deferral(c.Handlers.names()) }

func (p Policy) deferral(handlers []string) *policy.Policy {
	return &policy.Policy{Format: p.Format, Rules: p.Rules, Runtimes: runtimes(p.Runtimes, handlers)}
}
