// Package config is the daemon's configuration: defaults, then a YAML file, then flags,
// validated as a whole. The daemon and `crust-proxy validate` load it in the same way.
package config

import (
	"cmp"
	"path/filepath"
	"time"

	"go.yaml.in/yaml/v4"

	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/internal/ground/apiserver"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Config is everything that can be set. systemd/config.yaml describes each key. Every path is
// here, so that several daemons can run side by side. The tag "is" is for validateValue.
type Config struct {
	RunDir            string        `yaml:"runDir" is:"path"`
	KubeletRoot       string        `yaml:"kubeletRoot" is:"path"`
	RuntimeSocket     Socket        `yaml:"runtimeSocket"`
	AdminSocket       Socket        `yaml:"adminSocket"`
	Authorization     Authorization `yaml:"authorization"`
	Devices           Devices       `yaml:"devices"`
	Handlers          Handlers      `yaml:"handlers"`
	Front             Front         `yaml:"front"`
	Policy            Policy        `yaml:"policy"`
	Cluster           Cluster       `yaml:"cluster"`
	Containerd        Containerd    `yaml:"containerd"`
	CRI               CRI           `yaml:"cri"`
	Relay             Relay         `yaml:"relay"`
	ReconcileInterval time.Duration `yaml:"reconcileInterval" is:">=0"`
	HTTP              HTTP          `yaml:"http"`
	Tracing           Tracing       `yaml:"tracing"`
	Log               Log           `yaml:"log"`
	ShutdownTimeout   time.Duration `yaml:"shutdownTimeout" is:">=0"`
}

// Socket is a unix socket of ours.
type Socket struct {
	Path  string `yaml:"path" is:"socket"`
	Mode  string `yaml:"mode" is:"0600|0660"`
	Group string `yaml:"group"`
}

// Authorization is who may call each API, by the peer credentials from the kernel.
type Authorization struct {
	Runtime Callers `yaml:"runtime"`
	Admin   Callers `yaml:"admin"`
	CSI     Callers `yaml:"csi"`
}

// Callers is a set of users and groups.
type Callers struct {
	UIDs []uint32 `yaml:"uids"`
	GIDs []uint32 `yaml:"gids"`
}

// Devices says which devices are accepted.
type Devices struct {
	Roots   []string `yaml:"roots" is:"path"`
	Images  []string `yaml:"images" is:"path"`
	Classes []string `yaml:"classes"`
	Servers []string `yaml:"servers" is:"program"`
}

// Handlers are the runtime handlers.
type Handlers struct {
	Default string `yaml:"default"`
	Kata    Kata   `yaml:"kata"`
	Crust   Crust  `yaml:"crust"`
}

// Kata is the handler for both Kata runtimes.
type Kata struct {
	Enabled         bool     `yaml:"enabled"`
	DirectVolumes   string   `yaml:"directVolumes" is:"path"`
	GoSandboxes     string   `yaml:"goSandboxes" is:"path"`
	RustSandboxes   string   `yaml:"rustSandboxes" is:"path"`
	SharedSandboxes string   `yaml:"sharedSandboxes" is:"path"`
	TempDir         string   `yaml:"tempDir" is:"path?"`
	Filesystems     []string `yaml:"filesystems" is:"filesystem"`
	EndOrphans      bool     `yaml:"endOrphans"`
}

// Crust is the handler for runtimes that speak the directory ABI, such as crust-runc.
type Crust struct {
	Enabled     bool     `yaml:"enabled"`
	Root        string   `yaml:"root" is:"path"`
	TempDir     string   `yaml:"tempDir" is:"path?"`
	Programs    []string `yaml:"programs" is:"path"`
	SocketDirs  []string `yaml:"socketDirs" is:"path"`
	Filesystems []string `yaml:"filesystems" is:"filesystem"`
}

// Front stands between kubelet and CSI drivers.
type Front struct {
	Enabled         bool          `yaml:"enabled"`
	Registry        string        `yaml:"registry" is:"path"`
	KubeletRegistry string        `yaml:"kubeletRegistry" is:"path"`
	PrivateDir      string        `yaml:"privateDir" is:"path"`
	MarksDir        string        `yaml:"marksDir" is:"path"`
	DefaultFSType   string        `yaml:"defaultFSType" is:"filesystem"`
	AcceptLeftovers bool          `yaml:"acceptLeftovers"`
	AbandonVolumes  bool          `yaml:"abandonVolumes"`
	VolumeCondition bool          `yaml:"volumeCondition"`
	DriverTimeout   time.Duration `yaml:"driverTimeout" is:">0"`
}

// Policy decides which CSI volumes are deferred.
type Policy struct {
	Format   volume.FormatPolicy `yaml:"format"`
	Runtimes map[string]string   `yaml:"runtimes"`
	Rules    []policy.Rule       `yaml:"rules"`
}

// Cluster is the Kubernetes cluster to ask about the pods of this node.
type Cluster struct {
	Kubeconfig string `yaml:"kubeconfig" is:"path?"`
	InCluster  bool   `yaml:"inCluster"`
	NodeName   string `yaml:"nodeName"`
	Events     bool   `yaml:"events"`
}

// On reports whether a cluster is configured.
func (c Cluster) On() bool { return c.Kubeconfig != "" || c.InCluster }

// Node returns this node's name in the cluster.
func (c Cluster) Node() (string, error) {
	if c.NodeName != "" {
		return c.NodeName, nil
	}
	return apiserver.NodeName()
}

// Containerd is the container runtime whose sandboxes are followed.
type Containerd struct {
	Socket    string `yaml:"socket" is:"path?"`
	Namespace string `yaml:"namespace,omitempty"` // of older files: not used any more
}

// CRI is another container runtime whose sandboxes are followed.
type CRI struct {
	Socket string `yaml:"socket" is:"socket?"`
}

// Relay bounds what is asked of sandboxes.
type Relay struct {
	StatsTimeout  time.Duration `yaml:"statsTimeout" is:">0"`
	ExpandTimeout time.Duration `yaml:"expandTimeout" is:">0"`
	Concurrency   int           `yaml:"concurrency"`
	SlowAfter     time.Duration `yaml:"slowAfter" is:">0"`
	MaxSlow       int           `yaml:"maxSlow"`
}

// HTTP serves metrics and health, and with View what the Admin API shows.
type HTTP struct {
	Listen string `yaml:"listen"`
	View   bool   `yaml:"view"`
	Pprof  bool   `yaml:"pprof"`
}

// Tracing sends spans by OTLP over gRPC.
type Tracing struct {
	Endpoint    string  `yaml:"endpoint"`
	Insecure    bool    `yaml:"insecure"`
	SampleRatio float64 `yaml:"sampleRatio"`
}

// Log sets the log's level.
type Log struct {
	Level string `yaml:"level" is:"debug|info|warn|error"`
}

// Default is the configuration of a daemon without file and flags.
func Default() Config { return base().complete() }

// complete sets the defaults that depend on other keys, so that one key moves a whole daemon.
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
			Servers: []string{"multipathd", "nbd-client", "qemu-nbd", "rbd-nbd"},
		},
		Handlers: Handlers{
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
		},
		Front:      Front{DefaultFSType: "ext4", DriverTimeout: 2 * time.Minute},
		Policy:     Policy{Format: volume.FormatHost, Runtimes: baseRuntimes(), Rules: []policy.Rule{}},
		Containerd: Containerd{Socket: "/run/containerd/containerd.sock"},
		Relay: Relay{
			StatsTimeout: 10 * time.Second, ExpandTimeout: time.Minute,
			Concurrency: 64, SlowAfter: time.Second, MaxSlow: 1024,
		},
		ReconcileInterval: time.Minute,
		HTTP:              HTTP{Listen: "127.0.0.1:9814", View: true},
		Tracing:           Tracing{SampleRatio: 1},
		Log:               Log{Level: "info"},
		ShutdownTimeout:   20 * time.Second,
	}
}

// StateDir is where the records are.
func (c Config) StateDir() string { return filepath.Join(c.RunDir, "state") }

// CSISockets is where the sockets are that stand in for drivers'.
func (c Config) CSISockets() string { return filepath.Join(c.RunDir, "csi") }

// YAML encodes the configuration.
func (c Config) YAML() (string, error) {
	raw, err := yaml.Dump(c, yaml.WithLineWidth(-1))
	return string(raw), err
}

const (
	kataName  = "kata"
	crustName = "crust"
)

func (h *Handlers) complete() {
	if h.Default == "" && !h.Kata.Enabled && h.Crust.Enabled {
		h.Default = crustName
	}
	h.Default = cmp.Or(h.Default, kataName)
}

func (h Handlers) names() (names []string) {
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
	f.PrivateDir = cmp.Or(f.PrivateDir, filepath.Join(kubeletRoot, "plugins/kubernetes.io/csi/volumeDevices"))
}

// DeferralPolicy is the policy that decides.
func (c Config) DeferralPolicy() *policy.Policy { return c.Policy.deferral(c.Handlers.names()) }

func (p Policy) deferral(handlers []string) *policy.Policy {
	return &policy.Policy{Format: p.Format, Rules: p.Rules, Runtimes: runtimes(p.Runtimes, handlers)}
}
