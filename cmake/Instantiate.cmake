# instantiate(<directory> <sources>): generated sources in the build folder for the rows of <directory>/instances.def,
# made from <directory>/unit.cu.in. A row reads NAME(dtype, mode, head_dim, head_dim_v).
#
# The modes of one dtype and head dims make one source: the compiler then reads CuTe's headers once for all of them, and
# what they share is instantiated once. More in one source would leave processors idle at the end of a build.
#
# JAX_FMHA_INSTANCES selects rows. The build folder then gets an instances.def of its own, which dispatch finds before
# the complete one.
function(instantiate directory sources)
  file(RELATIVE_PATH relative ${PROJECT_SOURCE_DIR} ${directory})
  set(folder ${PROJECT_BINARY_DIR}/${relative})
  file(STRINGS ${directory}/instances.def selected REGEX "^[A-Z_]+\\(")
  if(JAX_FMHA_INSTANCES)
    list(FILTER selected INCLUDE REGEX "${JAX_FMHA_INSTANCES}")
    list(JOIN selected "\n" rows)
    file(CONFIGURE OUTPUT ${folder}/instances.def CONTENT "@rows@\n" @ONLY)
  else()
    file(REMOVE ${folder}/instances.def)
  endif()
  set(units)
  foreach(row IN LISTS selected)
    string(REGEX REPLACE "^.*\\((.*), .*, (.*), (.*)\\)$" "\\1_\\2_\\3" unit "${row}")
    list(APPEND units ${unit})
    list(APPEND rows_of_${unit} "${row}")
  endforeach()
  list(REMOVE_DUPLICATES units)
  set(generated)
  foreach(unit IN LISTS units)
    list(JOIN rows_of_${unit} "\n" rows)
    configure_file(${directory}/unit.cu.in ${folder}/${unit}.cu @ONLY)
    list(APPEND generated ${folder}/${unit}.cu)
  endforeach()
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${directory}/instances.def)
  set(${sources} ${generated} PARENT_SCOPE)
endfunction()
