package kata

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
)

// VM is the machine of a sandbox, with the requests of its shim to the VMM and to the guest's agent for each container.
// It is not the shim: when that is killed, the VM lives on with its disks open, and its agent gets no more requests.
type VM struct {
	Flavor    Flavor
	SandboxID string
	// DirectVolumes and Shared are Kata's directories on the node. If Shared is empty, runtime-rs makes no directory.
	DirectVolumes string
	Shared        string
	// Plug lets the VMM open a disk and returns the slot; Unplug removes it.
	Plug   func(device string, readOnly bool) (slot string, err error)
	Unplug func(device string)
	// Agent is called to create each container.
	Agent func(Request) error
	// ReadOnly reports whether the kernel has a device read-only, as runtime-rs checks. It may be nil.
	ReadOnly func(device string) bool

	disks      map[string]*disk
	containers map[string][]*disk
	made       int
}

// disk is a device that is plugged in.
type disk struct {
	device, slot string
	id           string // of runtime-rs: new for each time that the disk is attached
	users        int
	kept         bool // until the sandbox ends
}

// Mount is a bind mount of a container.
type Mount struct {
	Destination string   `json:"destination"`
	Source      string   `json:"source"`
	Type        string   `json:"type"`
	Options     []string `json:"options"`
}

// Storage is what the agent is to mount.
type Storage struct {
	Driver     string   `json:"driver"`
	Source     string   `json:"source"`
	FSType     string   `json:"fstype"`
	Options    []string `json:"options,omitempty"`
	MountPoint string   `json:"mount_point"`
	FSGroup    *FSGroup `json:"fs_group,omitempty"`
	// DriverOptions and Shared are set for Kata's own emptyDirs only.
	DriverOptions []string `json:"driver_options,omitempty"`
	Shared        bool     `json:"shared,omitempty"`
}

// FSGroup is the group that the agent applies to a filesystem.
type FSGroup struct {
	ID     uint32 `json:"group_id"`
	Policy string `json:"group_change_policy,omitempty"`
}

// Request is what the agent is asked for a container's volumes.
type Request struct {
	Container string
	Storages  []Storage
	Mounts    []Mount
}

// mountInfo is the file by which a shim learns of a volume.
type mountInfo struct {
	VolumeType *string           `json:"volume-type"`
	Device     *string           `json:"device"`
	FSType     *string           `json:"fstype"`
	Metadata   map[string]string `json:"metadata"`
	Options    []string          `json:"options"`
}

// CreateContainer does what a shim does with a container's bind mounts. Those
// whose sources are no volumes of Kata are left out.
func (m *VM) CreateContainer(id string, mounts []Mount) error {
	request := Request{Container: id}
	for _, mount := range mounts {
		info, err := m.infoOf(mount.Source)
		if err == nil && info != nil {
			err = m.add(&request, mount, info)
		}
		if err != nil {
			m.RemoveContainer(id)
			return err
		}
	}
	if err := m.Agent(request); err != nil {
		m.RemoveContainer(id)
		return err
	}
	return nil
}

// infoOf reads a volume's mountInfo.json; nil means that the source is none.
func (m *VM) infoOf(source string) (*mountInfo, error) {
	raw, err := os.ReadFile(filepath.Join(VolumeDir(m.DirectVolumes, source), "mountInfo.json"))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil //nolint:nilnil // neither is there a volume nor is that wrong
	}
	info := &mountInfo{}
	if err == nil {
		err = json.Unmarshal(raw, info)
	}
	if err == nil && (info.Device == nil || info.FSType == nil || info.VolumeType == nil) {
		err = errors.New("a key is missing")
	}
	if err == nil && m.Flavor == Rust && *info.VolumeType != "directvol" && !info.ownEmptyDir(source) {
		err = errors.New("unsupported volume type " + *info.VolumeType)
	}
	if err != nil {
		return nil, fmt.Errorf("kata shim: the volume of %s: %w", source, err)
	}
	return info, nil
}

// ownEmptyDir reports whether a volume is an emptyDir that Kata keeps on a disk image (its emptydir_mode).
func (i *mountInfo) ownEmptyDir(source string) bool {
	return *i.VolumeType == "blk" && path.Base(path.Dir(source)) == "kubernetes.io~empty-dir"
}

// add attaches a volume's disk, and asks the agent to mount it.
func (m *VM) add(request *Request, mount Mount, info *mountInfo) error {
	readOnly := slices.Contains(info.Options, "ro")
	if m.Flavor == Go {
		// Before the disk is attached, and it stays where that fails.
		if err := WriteID(m.DirectVolumes, mount.Source, m.SandboxID); err != nil {
			return err
		}
	} else {
		// The option alone does not make the disk read-only.
		readOnly = slices.Contains(mount.Options, "ro") || m.ReadOnly != nil && m.ReadOnly(*info.Device)
	}
	d, err := m.attach(request.Container, *info.Device, readOnly)
	if err != nil {
		return err
	}
	d.kept = info.ownEmptyDir(mount.Source)
	storage := Storage{Driver: "blk", Source: d.slot, FSType: *info.FSType, Options: slices.Clone(info.Options)}
	storage.MountPoint = "/run/kata-containers/sandbox/storage/" + base64.URLEncoding.EncodeToString([]byte(d.slot))
	if d.kept {
		storage.DriverOptions, storage.Shared = []string{"create_filesystem"}, true
	}
	if m.Flavor == Go {
		storage.FSGroup = groupOf(info.Metadata)
	} else if err := m.share(d, readOnly, &storage, &mount); err != nil {
		return err
	}
	mount.Source, mount.Type = storage.MountPoint, "bind"
	request.Storages = append(request.Storages, storage)
	request.Mounts = append(request.Mounts, mount)
	return nil
}

// groupOf returns the group that the Go runtime reads from the metadata. runtime-rs passes no group to the agent.
func groupOf(metadata map[string]string) *FSGroup {
	id, err := strconv.ParseUint(metadata["fsGroup"], 10, 32)
	if err != nil || id == 0 {
		return nil
	}
	return &FSGroup{ID: uint32(id), Policy: metadata["fsGroupChangePolicy"]}
}

// share makes the directory of runtime-rs for a volume of a container. Nobody
// removes it while the sandbox lives. The guest mounts the volume there, unless it
// is an emptyDir of Kata's own, and the container's mount has the volume's options.
func (m *VM) share(d *disk, readOnly bool, storage *Storage, mount *Mount) error {
	m.made++
	name := fmt.Sprintf("%s-%08x-%s", d.id, m.made, path.Base(mount.Destination))
	if m.Shared != "" {
		if err := os.MkdirAll(filepath.Join(m.Shared, m.SandboxID, "rw", "passthrough", name), 0o700); err != nil {
			return err
		}
	}
	if d.kept {
		return nil
	}
	storage.MountPoint = "/run/kata-containers/shared/containers/passthrough/" + name
	if readOnly && !slices.Contains(storage.Options, "ro") {
		storage.Options = append(storage.Options, "ro")
	}
	mount.Options = slices.Clone(mount.Options)
	for _, option := range storage.Options {
		if !slices.Contains(mount.Options, option) {
			mount.Options = append(mount.Options, option)
		}
	}
	return nil
}

// attach plugs a disk in, unless another container of the sandbox has it.
func (m *VM) attach(container, device string, readOnly bool) (*disk, error) {
	d := m.disks[device]
	if d == nil {
		slot, err := m.Plug(device, readOnly)
		if err != nil {
			return nil, err
		}
		m.made++
		d = &disk{device: device, slot: slot, id: fmt.Sprintf("%010x", m.made)}
		if m.disks == nil {
			m.disks, m.containers = make(map[string]*disk), make(map[string][]*disk)
		}
		m.disks[device] = d
	}
	d.users++
	m.containers[container] = append(m.containers[container], d)
	return d, nil
}

// RemoveContainer detaches what the container alone had: between two containers
// of a sandbox the disk is unplugged. Kata's own emptyDirs stay.
func (m *VM) RemoveContainer(id string) {
	for _, d := range m.containers[id] {
		known := m.disks[d.device] == d
		d.users--
		switch {
		case d.kept:
		case d.users == 0 && known:
			delete(m.disks, d.device)
			m.Unplug(d.device)
		case known && m.Flavor == Rust:
			// It forgets the disk that another container still has, and attaches it a second time for the next one.
			delete(m.disks, d.device)
		}
	}
	delete(m.containers, id)
}
