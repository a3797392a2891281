package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/crust-proxy/crust-proxy/test/rig"
)

// Mib is a unit of volumes' sizes.
const Mib = int64(1) << 20

// VolumeOptions say what volume is made. Only a name and a driver are needed.
type VolumeOptions struct {
	Name, Driver string
	// Size is in bytes; 64 MiB, or what the filesystem needs, unless set.
	Size int64
	// FS is the filesystem; ext4 unless set.
	FS string
	// Raw is a raw block volume.
	Raw bool
	// Mode is ReadWriteOnce unless set.
	Mode corev1.PersistentVolumeAccessMode
	// Attributes are added to the volume context, Options are mount options.
	Attributes map[string]string
	Options    []string
	// Change changes the PersistentVolume before it is made.
	Change func(*corev1.PersistentVolume)
	// From is the snapshot or claim that a volume of NewClaim is made from.
	From *corev1.TypedLocalObjectReference
}

// Volume is a claim with its volume, made by external-provisioner or, with the same name,
// as it does. Both go with the test.
type Volume struct {
	VolumeOptions
	// Handle is the driver's id, PV the name of the PersistentVolume.
	Handle, PV string
	k          *Kube
}

// NewVolume has the driver make a volume, and waits until the claim is bound.
func (k *Kube) NewVolume(options VolumeOptions) *Volume {
	k.T.Helper()
	return k.NewVolumes(options)[0]
}

// NewVolumes has the drivers make many volumes, and waits until all claims are bound.
func (k *Kube) NewVolumes(all ...VolumeOptions) []*Volume {
	k.T.Helper()
	var made []*Volume
	k.T.Cleanup(func() {
		var removing sync.WaitGroup
		for _, v := range made {
			removing.Go(func() { k.check(v.remove()) })
		}
		removing.Wait()
	})
	for _, options := range all {
		v := &Volume{VolumeOptions: options.complete(), k: k}
		made = append(made, v)
		k.Must(v.create())
	}
	for _, v := range made {
		k.Must(v.waitBound())
	}
	return made
}

func (v *Volume) create() error {
	ctx := context.Background()
	reply, err := v.k.Drivers[v.Driver].Controller().CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name: v.Name, CapacityRange: &csi.CapacityRange{RequiredBytes: v.Size}, VolumeCapabilities: []*csi.VolumeCapability{v.capability()},
	})
	if err != nil {
		return err
	}
	v.Handle, v.PV = reply.GetVolume().GetVolumeId(), v.Name
	core := v.k.Client.CoreV1()
	_, err = core.PersistentVolumes().Create(ctx, v.volume(reply.GetVolume().GetVolumeContext()), metav1.CreateOptions{})
	if err != nil {
		return err
	}
	_, err = core.PersistentVolumeClaims(Namespace).Create(ctx, v.claim(), metav1.CreateOptions{})
	return err
}

func (v *Volume) waitBound() error {
	return eventually("claim "+v.Name+" is bound", func(ctx context.Context) error {
		claim, err := v.k.Client.CoreV1().PersistentVolumeClaims(Namespace).Get(ctx, v.Name, metav1.GetOptions{})
		if err == nil && claim.Status.Phase != corev1.ClaimBound {
			err = fmt.Errorf("it is %s", claim.Status.Phase)
		}
		return err
	})
}

func (o VolumeOptions) complete() VolumeOptions {
	if o.FS == "" {
		o.FS = "ext4"
	}
	if o.Mode == "" {
		o.Mode = corev1.ReadWriteOnce
	}
	if o.Size == 0 {
		// No xfs is smaller than 300 MB, no btrfs than 109.
		o.Size = map[string]int64{"xfs": 320 * Mib, "btrfs": 128 * Mib, "ext4": 64 * Mib}[o.FS]
	}
	return o
}

func (v *Volume) capability() *csi.VolumeCapability {
	if v.Raw {
		return rig.BlockAccess()
	}
	return rig.MountAccess(v.FS)
}

func (v *Volume) mode() *corev1.PersistentVolumeMode {
	mode := corev1.PersistentVolumeFilesystem
	if v.Raw {
		mode = corev1.PersistentVolumeBlock
	}
	return &mode
}

func storage(size int64) corev1.ResourceList {
	return corev1.ResourceList{corev1.ResourceStorage: *resource.NewQuantity(size, resource.BinarySI)}
}

func (v *Volume) volume(attributes map[string]string) *corev1.PersistentVolume {
	all := maps.Clone(v.Attributes)
	if all == nil {
		all = map[string]string{}
	}
	maps.Copy(all, attributes)
	source := &corev1.CSIPersistentVolumeSource{Driver: v.Driver, VolumeHandle: v.Handle, VolumeAttributes: all}
	if !v.Raw {
		source.FSType = v.FS
	}
	pv := &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: v.Name},
		Spec: corev1.PersistentVolumeSpec{
			Capacity: storage(v.Size), AccessModes: []corev1.PersistentVolumeAccessMode{v.Mode}, VolumeMode: v.mode(),
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain, StorageClassName: v.Driver, MountOptions: v.Options,
			ClaimRef:               &corev1.ObjectReference{Namespace: Namespace, Name: v.Name},
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: source},
		},
	}
	if v.Change != nil {
		v.Change(pv)
	}
	return pv
}

func (v *Volume) claim() *corev1.PersistentVolumeClaim {
	return &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: v.Name, Namespace: Namespace}, Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{v.Mode}, VolumeMode: v.mode(),
			StorageClassName: &v.Driver, VolumeName: v.Name,
			Resources: corev1.VolumeResourceRequirements{Requests: storage(v.Size)},
		},
	}
}

// remove takes the claim, the volume and what the driver has away.
func (v *Volume) remove() error {
	if v.Handle == "" {
		return nil // it was never made
	}
	k, core := v.k, v.k.Client.CoreV1()
	mended := k.Mend() // a test may have ended while the driver was away
	gone := errors.Join(removed("claim", v.Name, core.PersistentVolumeClaims(Namespace), metav1.DeleteOptions{}),
		removed("volume", v.Name, core.PersistentVolumes(), metav1.DeleteOptions{}))
	// Kubelet unstages some time after the last pod has gone.
	return errors.Join(mended, gone, eventually("the driver removes volume "+v.Name, func(ctx context.Context) error {
		_, err := k.Drivers[v.Driver].Controller().DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.Handle})
		return err
	}))
}

// Grow raises the claim's size and does what external-resizer does: it has the driver grow the device, and leaves the
// filesystem to kubelet. WaitGrown waits for that.
func (v *Volume) Grow(size int64) {
	v.k.T.Helper()
	v.Edit(size)
	k, claims := v.k, v.k.Client.CoreV1().PersistentVolumeClaims(Namespace)
	ctx := context.Background()
	_, err := k.Drivers[v.Driver].Controller().ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{
		VolumeId: v.Handle, CapacityRange: &csi.CapacityRange{RequiredBytes: size}, VolumeCapability: v.capability(),
	})
	k.Must(err)
	k.Eventually("volume "+v.Name+" has its new capacity", func(ctx context.Context) error {
		pv, err := k.Client.CoreV1().PersistentVolumes().Get(ctx, v.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		pv.Spec.Capacity = storage(size)
		_, err = k.Client.CoreV1().PersistentVolumes().Update(ctx, pv, metav1.UpdateOptions{})
		return err
	})
	v.change(func(ctx context.Context, claim *corev1.PersistentVolumeClaim) error {
		claim.Status.AllocatedResources = storage(size)
		claim.Status.AllocatedResourceStatuses = map[corev1.ResourceName]corev1.ClaimResourceStatus{
			corev1.ResourceStorage: corev1.PersistentVolumeClaimNodeResizePending,
		}
		claim.Status.Conditions = []corev1.PersistentVolumeClaimCondition{{
			Type: corev1.PersistentVolumeClaimFileSystemResizePending, Status: corev1.ConditionTrue, LastTransitionTime: metav1.Now(),
			Message: "Waiting for user to (re-)start a pod to finish file system resize of volume on node.",
		}}
		_, err := claims.UpdateStatus(ctx, claim, metav1.UpdateOptions{})
		return err
	})
}

// Edit raises the size that the claim asks for, and leaves the rest to others.
func (v *Volume) Edit(size int64) {
	v.k.T.Helper()
	v.change(func(ctx context.Context, claim *corev1.PersistentVolumeClaim) error {
		claim.Spec.Resources.Requests = storage(size)
		_, err := v.k.Client.CoreV1().PersistentVolumeClaims(Namespace).Update(ctx, claim, metav1.UpdateOptions{})
		return err
	})
	v.Size = size
}

// change changes the claim as it is now.
func (v *Volume) change(how func(context.Context, *corev1.PersistentVolumeClaim) error) {
	v.k.T.Helper()
	v.k.Eventually("claim "+v.Name+" is changed", func(ctx context.Context) error {
		claim, err := v.k.Client.CoreV1().PersistentVolumeClaims(Namespace).Get(ctx, v.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		return how(ctx, claim)
	})
}

// WaitGrown waits until kubelet has grown the filesystem and written it down.
func (v *Volume) WaitGrown() {
	v.k.T.Helper()
	v.k.Eventually("claim "+v.Name+" has grown", func(ctx context.Context) error {
		claim, err := v.k.Client.CoreV1().PersistentVolumeClaims(Namespace).Get(ctx, v.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		has := claim.Status.Capacity[corev1.ResourceStorage]
		if has.Value() < v.Size || Resizes(claim) {
			return fmt.Errorf("it has %d bytes, and conditions %v", has.Value(), claim.Status.Conditions)
		}
		return nil
	})
}

// Resizes reports whether a claim has a condition about its growth. From Kubernetes 1.37 each has one about its use.
func Resizes(claim *corev1.PersistentVolumeClaim) bool {
	return slices.ContainsFunc(claim.Status.Conditions, func(is corev1.PersistentVolumeClaimCondition) bool { return is.Type != "Unused" })
}
