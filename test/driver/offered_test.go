//go:build system

package driver_test

// notOffered are csi-sanity's specs of what the driver does not advertise:
// publishing by a controller; the health calls of the controller and
// topology of snapshots; the limit of attached volumes, which has no meaning without a controller that attaches;
// and the spec of pagination that csi-sanity itself has switched off (TestPagination has
// its place).
func notOffered() []string {
	return []string{
		"Controller Service [Controller Server] ControllerPublishVolume should fail when no node id is provided",
		"Controller Service [Controller Server] ControllerPublishVolume should fail when no volume capability is provided",
		"Controller Service [Controller Server] ControllerPublishVolume should fail when no volume id is provided",
		"Controller Service [Controller Server] ControllerPublishVolume should fail when publishing more volumes than the node max attach limit",
		"Controller Service [Controller Server] ControllerPublishVolume should fail when the node does not exist",
		"Controller Service [Controller Server] ControllerPublishVolume should fail when the volume does not exist",
		"Controller Service [Controller Server] ControllerPublishVolume should fail when the volume is already published but is incompatible",
		"Controller Service [Controller Server] ControllerUnpublishVolume should fail when no volume id is provided",
		"Controller Service [Controller Server] ListVolumes pagination should detect volumes added between pages and accept tokens when the last volume from a page is deleted",
		"Controller Service [Controller Server] volume lifecycle should be idempotent",
		"Controller Service [Controller Server] volume lifecycle should work",
		"ControllerGetVolumeHealth [Controller Server] should fail when no volume id is provided",
		"ControllerGetVolumeHealth [Controller Server] should return health for a valid volume",
		"ControllerListVolumeHealth [Controller Server] should return appropriate response",
		"CreateSnapshot [Controller Server] should succeed when creating a snapshot with accessibility requirements",
	}
}
